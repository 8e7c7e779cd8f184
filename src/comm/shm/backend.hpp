// ShmBackend: collectives over shared memory between the ranks of one host. It is a c10d backend, so isograd
// and PyTorch use the same one. Ranks are processes, or threads of one process; the code is the same.
#pragma once

#include <ATen/ops/from_blob.h>
#include <fmt/format.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "base/refuse.hpp"
#include "base/torch_versions.hpp"
#include "comm/call.hpp"
#include "comm/shm/engine.hpp"
#include "comm/shm/work.hpp"

namespace isograd {

// Tensors are contiguous and on the CPU. Reductions, in rank order: SUM, MAX, MIN, PRODUCT and, for PyTorch,
// AVG, PREMUL_SUM, BAND, BOR and BXOR. 16-bit floats accumulate in float32. Copies: any type. Anything else
// is a ConfigError that names what is supported.
class ShmBackend final : public c10d::Backend {
 public:
  // Collective. Groups that share a store need different names. `timeout` limits joining and is the default
  // of every wait.
  ShmBackend(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::string name,
             std::chrono::milliseconds timeout, shm::EngineOptions options = {})
      : c10d::Backend(rank, size),
        store_(c10::make_intrusive<c10d::PrefixStore>("shm/" + name, std::move(store))),
        name_(std::move(name)),
        timeout_(timeout),
        engine_(std::make_shared<shm::Engine>(*store_, rank, size, name_, timeout, std::move(options))) {}

  const std::string getBackendName() const override { return "shm"; }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  void setSequenceNumberForGroup() override {}  // every collective carries its own number
  std::uint64_t getSequenceNumberForGroup() override { return engine_->sequence(); }

  using Works = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<Tensors>;
  using Splits = std::vector<std::int64_t>;
  Works allreduce(Tensors& tensors, const c10d::AllreduceOptions& options = {}) override {
    const at::Tensor& tensor = call("all_reduce").only(tensors);
    return work({all_reduce_one(tensor, options.reduceOp)}, c10d::OpType::ALLREDUCE, tensors,
                options.timeout);
  }
  Works allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options = {}) override {
    return several(tensors.size(), c10d::OpType::ALLREDUCE_COALESCED, tensors, options.timeout,
                   [&](std::size_t i) { return all_reduce_one(tensors[i], options.reduceOp); });
  }
  Works reduce(Tensors& tensors, const c10d::ReduceOptions& options = {}) override {
    const auto check = call("reduce");
    const at::Tensor& tensor = check.only(tensors);
    const int root = check.root(options.rootRank);
    const Region piece = check.piece(tensor);
    return work({start(shm::reduce(piece.data, tensor.numel(), code_of(tensor),
                                   check.reduction(tensor, options.reduceOp), root),
                       tensors)},
                c10d::OpType::REDUCE, tensors, options.timeout);
  }
  Works broadcast(Tensors& tensors, const c10d::BroadcastOptions& options = {}) override {
    const auto check = call("broadcast");
    const at::Tensor& tensor = check.only(tensors);
    const int root = check.root(options.rootRank);
    return work({start(shm::broadcast(check.piece(tensor), tensor.numel(), code_of(tensor), root, size_,
                                      rank_ == root),
                       tensors)},
                c10d::OpType::BROADCAST, tensors, options.timeout);
  }
  Works barrier(const c10d::BarrierOptions& options = {}) override {
    return work({start(shm::barrier(), {})}, c10d::OpType::BARRIER, {}, options.timeout);
  }

  // The tensors of a list may differ in size, in the same way on all ranks.
  Works allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options = {}) override {
    const auto check = call("all_gather");
    const at::Tensor& input = check.only(inputs);
    return work({all_gather_list(check.one_list(outputs), input)}, c10d::OpType::ALLGATHER, outputs[0],
                options.timeout);
  }
  Works _allgather_base(at::Tensor& output, at::Tensor& input,
                        const c10d::AllgatherOptions& options = {}) override {
    return work({all_gather_one(output, input)}, c10d::OpType::_ALLGATHER_BASE, {output}, options.timeout);
  }
  // As above, with the outputs sorted by rank first.
  Works allgather_coalesced(Lists& outputs, Tensors& inputs,
                            const c10d::AllgatherOptions& options = {}) override {
    std::vector<Tensors> lists(inputs.size());
    Tensors results;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      for (const Tensors& of_rank : outputs) {
        call("all_gather").as_many(of_rank.size(), inputs.size());
        lists[i].push_back(of_rank[i]);
      }
      results.insert(results.end(), lists[i].begin(), lists[i].end());
    }
    return several(inputs.size(), c10d::OpType::ALLGATHER_COALESCED, std::move(results), options.timeout,
                   [&](std::size_t i) { return all_gather_list(lists[i], inputs[i]); });
  }
  Works allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                        const c10d::AllgatherOptions& options = {}) override {
    call("all_gather").as_many(outputs.size(), inputs.size());
    return several(inputs.size(), c10d::OpType::ALLGATHER_COALESCED, outputs, options.timeout,
                   [&](std::size_t i) { return all_gather_one(outputs[i], inputs[i]); });
  }
  Works reduce_scatter(Tensors& outputs, Lists& inputs,
                       const c10d::ReduceScatterOptions& options = {}) override {
    const auto check = call("reduce_scatter");
    const at::Tensor& output = check.only(outputs);
    const Region to = check.piece(output);
    auto pieces = check.list(check.one_list(inputs), output);
    check.same_size(output, inputs[0][static_cast<std::size_t>(rank_)]);
    check.disjoint(to, pieces);
    Tensors used = inputs[0];
    used.push_back(output);
    return work({start(shm::reduce_scatter(std::move(pieces), to, code_of(output),
                                           check.reduction(output, options.reduceOp)),
                       std::move(used))},
                c10d::OpType::REDUCE_SCATTER, {output}, options.timeout);
  }
  Works _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                             const c10d::ReduceScatterOptions& options = {}) override {
    return work({reduce_scatter_one(output, input, options.reduceOp)}, c10d::OpType::_REDUCE_SCATTER_BASE,
                {output}, options.timeout);
  }
  // _reduce_scatter_base of a sum; `squares` becomes Σ x² over `output` (fp32, fp64, bf16).
  Works reduce_scatter_with_squares(const at::Tensor& output, const at::Tensor& input,
                                    std::shared_ptr<double> squares, std::chrono::milliseconds timeout) {
    return work({reduce_scatter_one(output, input, c10d::ReduceOp::SUM, std::move(squares))},
                c10d::OpType::_REDUCE_SCATTER_BASE, {output}, timeout);
  }
  Works reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                        const c10d::ReduceScatterOptions& options = {}) override {
    call("reduce_scatter").as_many(outputs.size(), inputs.size());
    return several(
        inputs.size(), torch_versions::kReduceScatterCoalesced, outputs, options.timeout,
        [&](std::size_t i) { return reduce_scatter_one(outputs[i], inputs[i], options.reduceOp); });
  }

  Works gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options = {}) override {
    const auto check = call("gather");
    const at::Tensor& input = check.only(inputs);
    const int root = check.root(options.rootRank);
    std::vector<Region> places;
    Tensors used{input}, results;
    if (rank_ == root) {
      places = check.list(check.one_list(outputs), input, input.numel());
      check.disjoint(check.piece(input), places);
      results = outputs[0];
      used.insert(used.end(), results.begin(), results.end());
    }
    return work(
        {start(shm::gather(check.piece(input), std::move(places), input.numel(), code_of(input), root),
               std::move(used))},
        c10d::OpType::GATHER, std::move(results), options.timeout);
  }
  Works scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options = {}) override {
    const auto check = call("scatter");
    const at::Tensor& output = check.only(outputs);
    const int root = check.root(options.rootRank);
    std::vector<Region> pieces;
    Tensors used{output};
    if (rank_ == root) {
      pieces = check.list(check.one_list(inputs), output, output.numel());
      check.disjoint(check.piece(output), pieces);
      used.insert(used.end(), inputs[0].begin(), inputs[0].end());
    }
    return work({start(shm::scatter(check.piece(output), std::move(pieces), output.numel(), code_of(output),
                                    root, size_),
                       std::move(used))},
                c10d::OpType::SCATTER, outputs, options.timeout);
  }
  Works alltoall_base(at::Tensor& output, at::Tensor& input, Splits& output_splits, Splits& input_splits,
                      const c10d::AllToAllOptions& options = {}) override {
    const auto check = call("all_to_all");
    check.same_type(output, input);
    auto places = check.cut_rows(output, output_splits);
    auto pieces = check.cut_rows(input, input_splits);
    check.disjoint(pieces, places);
    return work(
        {start(shm::all_to_all(std::move(places), std::move(pieces), code_of(input)), {output, input})},
        c10d::OpType::ALLTOALL_BASE, {output}, options.timeout);
  }
  Works alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options = {}) override {
    const auto check = call("all_to_all");
    check.one_for_each(inputs);
    auto places = check.list(outputs, inputs[0]);
    auto pieces = check.list(inputs, inputs[0]);
    check.disjoint(pieces, places);
    Tensors used = outputs;
    used.insert(used.end(), inputs.begin(), inputs.end());
    return work(
        {start(shm::all_to_all(std::move(places), std::move(pieces), code_of(inputs[0])), std::move(used))},
        c10d::OpType::ALLTOALL, outputs, options.timeout);
  }

  // A receive takes messages of its tag only. Messages of one tag arrive in order.
  Works send(Tensors& tensors, int to, int tag) override {
    const auto check = call("send");
    const at::Tensor& tensor = check.only(tensors);
    const Region piece = check.piece(tensor);
    return work(
        {start(shm::send(piece.data, piece.bytes, tensor.numel(), code_of(tensor), check.peer(to), tag),
               tensors)},
        c10d::OpType::SEND, {}, c10d::kUnsetTimeout);
  }
  Works recv(Tensors& tensors, int from, int tag) override {
    call("recv").peer(from);
    return work({receive_one(tensors, from, tag)}, c10d::OpType::RECV, tensors, c10d::kUnsetTimeout);
  }
  Works recvAnysource(Tensors& tensors, int tag) override {
    return work({receive_one(tensors, -1, tag)}, c10d::OpType::RECVANYSOURCE, tensors, c10d::kUnsetTimeout);
  }

  Works allreduce_sparse(Tensors&, const c10d::AllreduceOptions&) override {
    call("all_reduce").refuse("sparse tensors", "dense ones", "Call to_dense() first");
  }

  // Collective: a flat zero-filled tensor in memory that every rank can read.
  at::Tensor empty_shared(std::int64_t numel, at::ScalarType dtype) {
    return allocate(numel, dtype, shm::Engine::Copies::kPerRank);
  }
  // Collective: the same tensor on every rank. Collectives treat it as an ordinary tensor.
  at::Tensor host_shared(std::int64_t numel, at::ScalarType dtype) {
    return allocate(numel, dtype, shm::Engine::Copies::kOne);
  }
  void poison(const std::string& reason) noexcept { engine_->poison(reason); }
  void abort() override { engine_->poison("the group was aborted"); }
  // The last operations of this rank, one per line.
  std::string history() { return engine_->history(); }

 private:
  using Task = std::shared_ptr<shm::Task>;
  using Region = shm::Region;
  static std::int8_t code_of(const at::Tensor& tensor) {
    return static_cast<std::int8_t>(tensor.scalar_type());
  }
  // `used` is kept alive until the task is complete.
  Task start(Task task, Tensors used) {
    task->keep_alive = std::make_shared<Tensors>(std::move(used));
    engine_->start(task);
    return task;
  }
  at::Tensor allocate(std::int64_t numel, at::ScalarType dtype, shm::Engine::Copies copies) {
    const bool one = copies == shm::Engine::Copies::kOne;
    const auto width = static_cast<std::int64_t>(c10::elementSize(dtype));
    if (numel < 0 || numel > (std::int64_t{1} << 60) / (width * size_))
      refuse(fmt::format("{} of group '{}'", one ? "host_shared" : "empty_shared", name_),
             fmt::format("{} elements of {} bytes", numel, width), "a size that memory can have",
             "Check how the size was computed");
    auto allocation = engine_->allocate(static_cast<std::uint64_t>(numel * width), copies,
                                        static_cast<std::int8_t>(dtype), numel, timeout_);
    std::byte* data = one ? allocation->data(0) : allocation->own();
    return at::from_blob(
        data, {numel}, [allocation](void*) { allocation->release(); }, at::TensorOptions(dtype));
  }
  Works work(std::vector<Task> tasks, c10d::OpType type, Tensors results, std::chrono::milliseconds timeout) {
    return c10::make_intrusive<ShmWork>(engine_, std::move(tasks), rank_, type, std::move(results),
                                        timeout == c10d::kUnsetTimeout ? timeout_ : timeout);
  }
  Works several(std::size_t count, c10d::OpType type, Tensors results, std::chrono::milliseconds timeout,
                const std::function<Task(std::size_t)>& start_one) {
    std::vector<Task> tasks;
    for (std::size_t i = 0; i < count; ++i) tasks.push_back(start_one(i));
    return work(std::move(tasks), type, std::move(results), timeout);
  }
  Task all_reduce_one(const at::Tensor& tensor, const c10d::ReduceOp& op) {
    const auto check = call("all_reduce");
    const Region piece = check.piece(tensor);
    return start(shm::all_reduce(piece.data, tensor.numel(), code_of(tensor), check.reduction(tensor, op)),
                 {tensor});
  }
  Task all_gather_one(const at::Tensor& output, const at::Tensor& input) {
    const auto check = call("all_gather");
    const Region piece = check.piece(input);
    auto places = check.cut(output, input);
    check.disjoint(piece, places);
    return start(shm::all_gather(piece, std::move(places), input.numel(), code_of(input)), {output, input});
  }
  Task all_gather_list(const Tensors& outputs, const at::Tensor& input) {
    const auto check = call("all_gather");
    auto places = check.list(outputs, input);
    check.same_size(outputs[static_cast<std::size_t>(rank_)], input);
    const Region piece = check.piece(input);
    check.disjoint(piece, places);
    Tensors used = outputs;
    used.push_back(input);
    return start(shm::all_gather(piece, std::move(places), input.numel(), code_of(input)), std::move(used));
  }
  // The output may be this rank's own part of the input, because no peer reads that.
  Task reduce_scatter_one(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op,
                          std::shared_ptr<double> squares = nullptr) {
    const auto check = call("reduce_scatter");
    const Region to = check.piece(output);
    auto pieces = check.cut(input, output);
    check.disjoint(to, pieces);
    return start(shm::reduce_scatter(std::move(pieces), to, code_of(input), check.reduction(input, op),
                                     std::move(squares)),
                 {output, input});
  }
  Task receive_one(const Tensors& tensors, int from, int tag) {
    const auto check = call("recv");
    const at::Tensor& tensor = check.only(tensors);
    const Region piece = check.piece(tensor);
    return start(shm::receive(piece.data, piece.bytes, tensor.numel(), code_of(tensor),
                              from < 0 ? from : check.peer(from), tag),
                 tensors);
  }
  Call call(const char* operation) const { return {operation, name_, rank_, size_, "shm"}; }

  c10::intrusive_ptr<c10d::Store> store_;  // where rank 0 hosts it, it must live until all have joined
  std::string name_;
  std::chrono::milliseconds timeout_;
  std::shared_ptr<shm::Engine> engine_;
};

}  // namespace isograd
