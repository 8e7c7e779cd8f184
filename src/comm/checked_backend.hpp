// c10d's operations for a backend that moves memory of the CPU: checks their arguments and reduces their
// forms to one function each, so that a backend states how it runs them and nothing else.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "base/torch_versions.hpp"
#include "comm/call.hpp"

namespace isograd {

// The parts that an operation has for or from each rank: slices of one tensor, or one tensor for each rank.
struct Parts {
  Tensors tensors{};
  std::vector<Call::Region> by_rank{};  // empty: this rank has none
};

// `Step`: a checked operation that is not started yet. All steps of a call are checked before one starts.
template <typename Step>
class CheckedBackend : public c10d::Backend {
 public:
  using Works = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<Tensors>;
  using Splits = std::vector<std::int64_t>;

  const std::string getBackendName() const override { return kind_; }

  Works allreduce(Tensors& tensors, const c10d::AllreduceOptions& options = {}) override {
    const Call check = call("all_reduce");
    return run(check, {all_reduced(check, check.only(tensors), options.reduceOp)}, OpType::ALLREDUCE, tensors,
               options.timeout);
  }
  Works allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options = {}) override {
    const Call check = call("all_reduce_coalesced");
    Steps steps;
    for (const at::Tensor& tensor : tensors) steps.push_back(all_reduced(check, tensor, options.reduceOp));
    return run(check, std::move(steps), OpType::ALLREDUCE_COALESCED, tensors, options.timeout);
  }
  Works allreduce_sparse(Tensors&, const c10d::AllreduceOptions&) override {
    call("all_reduce").refuse("sparse tensors", "dense ones", "Call to_dense() first");
  }
  Works reduce(Tensors& tensors, const c10d::ReduceOptions& options = {}) override {
    const Call check = call("reduce");
    const at::Tensor& tensor = check.only(tensors);
    const int root = check.root(options.rootRank);
    check.piece(tensor);
    return run(check, {make_reduce(tensor, check.reduction(tensor, options.reduceOp), root)}, OpType::REDUCE,
               tensors, options.timeout);
  }
  Works broadcast(Tensors& tensors, const c10d::BroadcastOptions& options = {}) override {
    const Call check = call("broadcast");
    const at::Tensor& tensor = check.only(tensors);
    const int root = check.root(options.rootRank);
    check.piece(tensor);
    return run(check, {make_broadcast(check, tensor, root)}, OpType::BROADCAST, tensors, options.timeout);
  }
  Works barrier(const c10d::BarrierOptions& options = {}) override {
    return run(call("barrier"), {make_barrier()}, OpType::BARRIER, {}, options.timeout);
  }

  // The tensors of a list may differ in size, in the same way on all ranks.
  Works allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options = {}) override {
    const Call check = call("all_gather");
    const at::Tensor& input = check.only(inputs);
    const Tensors& list = check.one_list(outputs);
    return run(check, {gathered_list(check, list, input)}, OpType::ALLGATHER, list, options.timeout);
  }
  Works _allgather_base(at::Tensor& output, at::Tensor& input,
                        const c10d::AllgatherOptions& options = {}) override {
    const Call check = call("all_gather");
    return run(check, {gathered(check, output, input)}, OpType::_ALLGATHER_BASE, {output}, options.timeout);
  }
  // As allgather of each input, with the outputs sorted by rank first.
  Works allgather_coalesced(Lists& outputs, Tensors& inputs,
                            const c10d::AllgatherOptions& options = {}) override {
    const Call check = call("all_gather_coalesced");
    Steps steps;
    Tensors results;
    for (const Tensors& of_rank : outputs) check.as_many(of_rank.size(), inputs.size());
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      Tensors list;
      for (const Tensors& of_rank : outputs) list.push_back(of_rank[i]);
      steps.push_back(gathered_list(check, list, inputs[i]));
      results.insert(results.end(), list.begin(), list.end());
    }
    return run(check, std::move(steps), OpType::ALLGATHER_COALESCED, std::move(results), options.timeout);
  }
  Works allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                        const c10d::AllgatherOptions& options = {}) override {
    const Call check = call("all_gather_coalesced");
    check.as_many(outputs.size(), inputs.size());
    Steps steps;
    for (std::size_t i = 0; i < inputs.size(); ++i) steps.push_back(gathered(check, outputs[i], inputs[i]));
    return run(check, std::move(steps), OpType::ALLGATHER_COALESCED, outputs, options.timeout);
  }

  Works reduce_scatter(Tensors& outputs, Lists& inputs,
                       const c10d::ReduceScatterOptions& options = {}) override {
    const Call check = call("reduce_scatter");
    const at::Tensor& output = check.only(outputs);
    const Tensors& list = check.one_list(inputs);
    check.same_size(output, list[static_cast<std::size_t>(rank_)]);
    check.piece(output);
    return run(check,
               {make_reduce_scatter(check, output, {list, check.list(list, output)},
                                    check.reduction(output, options.reduceOp))},
               OpType::REDUCE_SCATTER, {output}, options.timeout);
  }
  Works _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                             const c10d::ReduceScatterOptions& options = {}) override {
    const Call check = call("reduce_scatter");
    return run(check, {reduce_scattered(check, output, input, options.reduceOp)},
               OpType::_REDUCE_SCATTER_BASE, {output}, options.timeout);
  }
  Works reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                        const c10d::ReduceScatterOptions& options = {}) override {
    const Call check = call("reduce_scatter_coalesced");
    check.as_many(outputs.size(), inputs.size());
    Steps steps;
    for (std::size_t i = 0; i < inputs.size(); ++i)
      steps.push_back(reduce_scattered(check, outputs[i], inputs[i], options.reduceOp));
    return run(check, std::move(steps), torch_versions::kReduceScatterCoalesced, outputs, options.timeout);
  }

  Works gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options = {}) override {
    const Call check = call("gather");
    const at::Tensor& input = check.only(inputs);
    const int root = check.root(options.rootRank);
    check.piece(input);
    Parts parts;
    if (rank_ == root) parts.tensors = check.one_list(outputs), parts.by_rank = at_root(check, parts, input);
    Tensors results = parts.tensors;
    return run(check, {make_gather(check, input, std::move(parts), root)}, OpType::GATHER, std::move(results),
               options.timeout);
  }
  Works scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options = {}) override {
    const Call check = call("scatter");
    const at::Tensor& output = check.only(outputs);
    const int root = check.root(options.rootRank);
    check.piece(output);
    Parts parts;
    if (rank_ == root) parts.tensors = check.one_list(inputs), parts.by_rank = at_root(check, parts, output);
    return run(check, {make_scatter(check, output, std::move(parts), root)}, OpType::SCATTER, outputs,
               options.timeout);
  }
  // Splits are numbers of rows (dim 0). Without splits the parts are equal.
  Works alltoall_base(at::Tensor& output, at::Tensor& input, Splits& output_splits, Splits& input_splits,
                      const c10d::AllToAllOptions& options = {}) override {
    const Call check = call("all_to_all");
    check.same_type(output, input);
    return run(check,
               {make_all_to_all(check, {{output}, check.cut_rows(output, output_splits)},
                                {{input}, check.cut_rows(input, input_splits)})},
               OpType::ALLTOALL_BASE, {output}, options.timeout);
  }
  Works alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options = {}) override {
    const Call check = call("all_to_all");
    check.one_for_each(inputs);
    return run(check,
               {make_all_to_all(check, {outputs, check.list(outputs, inputs[0])},
                                {inputs, check.list(inputs, inputs[0])})},
               OpType::ALLTOALL, outputs, options.timeout);
  }

  // A receive takes messages of its tag only. Messages of one tag arrive in order.
  Works send(Tensors& tensors, int to, int tag) override {
    const Call check = call("send");
    const at::Tensor& tensor = check.only(tensors);
    check.piece(tensor), check.peer(to);
    return run(check, {make_send(check, tensor, to, tag)}, OpType::SEND, {}, c10d::kUnsetTimeout, to);
  }
  Works recv(Tensors& tensors, int from, int tag) override {
    call("recv").peer(from);
    return received(tensors, from, tag, OpType::RECV);
  }
  Works recvAnysource(Tensors& tensors, int tag) override {
    return received(tensors, kAnyRank, tag, OpType::RECVANYSOURCE);
  }

 protected:
  using OpType = c10d::OpType;
  using Steps = std::vector<Step>;
  static constexpr int kAnyRank = -1, kAllRanks = -1;  // in place of a sender, and of a root

  CheckedBackend(int rank, int size, std::string name, const char* kind, bool uneven_at_root)
      : c10d::Backend(rank, size), name_(std::move(name)), kind_(kind), uneven_at_root_(uneven_at_root) {}

  // Tensors are contiguous and on the CPU. Parts of a gather or scatter are empty away from the root. An
  // all-reduce is a reduction to kAllRanks, an all-gather a gather.
  virtual Step make_reduce(const at::Tensor& tensor, const shm::Reduction& reduction, int root) = 0;
  virtual Step make_broadcast(const Call& check, const at::Tensor& tensor, int root) = 0;
  virtual Step make_reduce_scatter(const Call& check, const at::Tensor& output, Parts inputs,
                                   const shm::Reduction& reduction) = 0;
  virtual Step make_gather(const Call& check, const at::Tensor& input, Parts outputs, int root) = 0;
  virtual Step make_scatter(const Call& check, const at::Tensor& output, Parts inputs, int root) = 0;
  virtual Step make_all_to_all(const Call& check, Parts outputs, Parts inputs) = 0;
  virtual Step make_send(const Call& check, const at::Tensor& tensor, int to, int tag) = 0;
  virtual Step make_recv(const Call& check, const at::Tensor& tensor, int from, int tag) = 0;
  virtual Step make_barrier() = 0;
  // Starts the steps of one call. `peer`: the other end of a message.
  virtual Works run(const Call& call, Steps steps, OpType type, Tensors results,
                    std::chrono::milliseconds timeout, int peer = kAnyRank) = 0;

  Call call(const char* operation) const { return {operation, name_, rank_, size_, kind_}; }

  const std::string name_;

 private:
  Step all_reduced(const Call& check, const at::Tensor& tensor, const c10d::ReduceOp& op) {
    check.piece(tensor);
    return make_reduce(tensor, check.reduction(tensor, op), kAllRanks);
  }
  Step gathered(const Call& check, const at::Tensor& output, const at::Tensor& input) {
    check.piece(input);
    return make_gather(check, input, {{output}, check.cut(output, input)}, kAllRanks);
  }
  Step gathered_list(const Call& check, const Tensors& outputs, const at::Tensor& input) {
    check.piece(input);
    Parts parts{outputs, check.list(outputs, input)};
    check.same_size(outputs[static_cast<std::size_t>(rank_)], input);
    return make_gather(check, input, std::move(parts), kAllRanks);
  }
  Step reduce_scattered(const Call& check, const at::Tensor& output, const at::Tensor& input,
                        const c10d::ReduceOp& op) {
    check.piece(output);
    return make_reduce_scatter(check, output, {{input}, check.cut(input, output)},
                               check.reduction(input, op));
  }
  std::vector<Call::Region> at_root(const Call& check, const Parts& parts, const at::Tensor& own) const {
    return check.list(parts.tensors, own, uneven_at_root_ ? -1 : own.numel());
  }
  Works received(Tensors& tensors, int from, int tag, OpType type) {
    const Call check = call("recv");
    const at::Tensor& tensor = check.only(tensors);
    check.piece(tensor);
    return run(check, {make_recv(check, tensor, from, tag)}, type, tensors, c10d::kUnsetTimeout, from);
  }

  const char* kind_;
  const bool uneven_at_root_;  // gather and scatter take parts of different sizes
};

}  // namespace isograd
