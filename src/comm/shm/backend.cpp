#include "comm/shm/backend.hpp"

#include <ATen/ops/from_blob.h>
#include <fmt/format.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/refuse.hpp"
#include "base/torch_versions.hpp"
#include "comm/shm/operation.hpp"
#include "isograd/error.hpp"

namespace isograd {

using shm::code_of;
using shm::Region;

ShmBackend::ShmBackend(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::string name,
                       std::chrono::milliseconds timeout, shm::EngineOptions options)
    : c10d::Backend(rank, size),
      store_(c10::make_intrusive<c10d::PrefixStore>("shm/" + name, std::move(store))),
      name_(std::move(name)),
      timeout_(timeout),
      engine_(std::make_shared<shm::Engine>(*store_, rank, size, name_, timeout, std::move(options))) {}

ShmBackend::Task ShmBackend::start(Task task, Tensors used) {
  task->keep_alive = std::make_shared<Tensors>(std::move(used));
  engine_->start(task);
  return task;
}

ShmBackend::Works ShmBackend::work(std::vector<Task> tasks, c10d::OpType type, Tensors results,
                                   std::chrono::milliseconds timeout) {
  return c10::make_intrusive<ShmWork>(engine_, std::move(tasks), rank_, type, std::move(results),
                                      timeout == c10d::kUnsetTimeout ? timeout_ : timeout);
}

ShmBackend::Works ShmBackend::several(std::size_t count, c10d::OpType type, Tensors results,
                                      std::chrono::milliseconds timeout,
                                      const std::function<Task(std::size_t)>& start_one) {
  std::vector<Task> tasks;
  for (std::size_t i = 0; i < count; ++i) tasks.push_back(start_one(i));
  return work(std::move(tasks), type, std::move(results), timeout);
}

ShmBackend::Task ShmBackend::all_reduce_one(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  const auto check = arguments("all_reduce");
  const Region piece = check.piece(tensor);
  return start(shm::all_reduce(piece.data, tensor.numel(), code_of(tensor), check.reduction(tensor, op)),
               {tensor});
}

ShmBackend::Works ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const at::Tensor& tensor = arguments("all_reduce").only(tensors);
  return work({all_reduce_one(tensor, options.reduceOp)}, c10d::OpType::ALLREDUCE, tensors, options.timeout);
}

ShmBackend::Works ShmBackend::allreduce_coalesced(Tensors& tensors,
                                                  const c10d::AllreduceCoalescedOptions& options) {
  return several(tensors.size(), c10d::OpType::ALLREDUCE_COALESCED, tensors, options.timeout,
                 [&](std::size_t i) { return all_reduce_one(tensors[i], options.reduceOp); });
}

ShmBackend::Works ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const auto check = arguments("reduce");
  const at::Tensor& tensor = check.only(tensors);
  const int root = check.root(options.rootRank);
  const Region piece = check.piece(tensor);
  return work({start(shm::reduce(piece.data, tensor.numel(), code_of(tensor),
                                 check.reduction(tensor, options.reduceOp), root),
                     tensors)},
              c10d::OpType::REDUCE, tensors, options.timeout);
}

ShmBackend::Works ShmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const auto check = arguments("broadcast");
  const at::Tensor& tensor = check.only(tensors);
  const int root = check.root(options.rootRank);
  return work(
      {start(shm::broadcast(check.piece(tensor), tensor.numel(), code_of(tensor), root, size_, rank_ == root),
             tensors)},
      c10d::OpType::BROADCAST, tensors, options.timeout);
}

ShmBackend::Works ShmBackend::barrier(const c10d::BarrierOptions& options) {
  return work({start(shm::barrier(), {})}, c10d::OpType::BARRIER, {}, options.timeout);
}

ShmBackend::Task ShmBackend::all_gather_list(const Tensors& outputs, const at::Tensor& input) {
  const auto check = arguments("all_gather");
  auto places = check.list(outputs, input);
  check.same_size(outputs[static_cast<std::size_t>(rank_)], input);
  const Region piece = check.piece(input);
  check.check_disjoint(piece, places);
  Tensors used = outputs;
  used.push_back(input);
  return start(shm::all_gather(piece, std::move(places), input.numel(), code_of(input)), std::move(used));
}

ShmBackend::Works ShmBackend::allgather(Lists& outputs, Tensors& inputs,
                                        const c10d::AllgatherOptions& options) {
  const auto check = arguments("all_gather");
  const at::Tensor& input = check.only(inputs);
  return work({all_gather_list(check.one_list(outputs), input)}, c10d::OpType::ALLGATHER, outputs[0],
              options.timeout);
}

// As above, with the outputs sorted by rank first.
ShmBackend::Works ShmBackend::allgather_coalesced(Lists& outputs, Tensors& inputs,
                                                  const c10d::AllgatherOptions& options) {
  std::vector<Tensors> lists(inputs.size());
  Tensors results;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    for (const Tensors& of_rank : outputs) {
      arguments("all_gather").as_many(of_rank.size(), inputs.size());
      lists[i].push_back(of_rank[i]);
    }
    results.insert(results.end(), lists[i].begin(), lists[i].end());
  }
  return several(inputs.size(), c10d::OpType::ALLGATHER_COALESCED, std::move(results), options.timeout,
                 [&](std::size_t i) { return all_gather_list(lists[i], inputs[i]); });
}

ShmBackend::Task ShmBackend::all_gather_one(const at::Tensor& output, const at::Tensor& input) {
  const auto check = arguments("all_gather");
  const Region piece = check.piece(input);
  auto places = check.cut(output, input);
  check.check_disjoint(piece, places);
  return start(shm::all_gather(piece, std::move(places), input.numel(), code_of(input)), {output, input});
}

ShmBackend::Works ShmBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                              const c10d::AllgatherOptions& options) {
  return work({all_gather_one(output, input)}, c10d::OpType::_ALLGATHER_BASE, {output}, options.timeout);
}

ShmBackend::Works ShmBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                              const c10d::AllgatherOptions& options) {
  arguments("all_gather").as_many(outputs.size(), inputs.size());
  return several(inputs.size(), c10d::OpType::ALLGATHER_COALESCED, outputs, options.timeout,
                 [&](std::size_t i) { return all_gather_one(outputs[i], inputs[i]); });
}

ShmBackend::Works ShmBackend::reduce_scatter(Tensors& outputs, Lists& inputs,
                                             const c10d::ReduceScatterOptions& options) {
  const auto check = arguments("reduce_scatter");
  const at::Tensor& output = check.only(outputs);
  const Region to = check.piece(output);
  auto pieces = check.list(check.one_list(inputs), output);
  check.same_size(output, inputs[0][static_cast<std::size_t>(rank_)]);
  check.check_disjoint(to, pieces);
  Tensors used = inputs[0];
  used.push_back(output);
  return work({start(shm::reduce_scatter(std::move(pieces), to, code_of(output),
                                         check.reduction(output, options.reduceOp)),
                     std::move(used))},
              c10d::OpType::REDUCE_SCATTER, {output}, options.timeout);
}

// The output may be this rank's own part of the input, because no peer reads that.
ShmBackend::Task ShmBackend::reduce_scatter_one(const at::Tensor& output, const at::Tensor& input,
                                                const c10d::ReduceOp& op, std::shared_ptr<double> squares) {
  const auto check = arguments("reduce_scatter");
  const Region to = check.piece(output);
  auto pieces = check.cut(input, output);
  check.check_disjoint(to, pieces);
  return start(shm::reduce_scatter(std::move(pieces), to, code_of(input), check.reduction(input, op),
                                   std::move(squares)),
               {output, input});
}

ShmBackend::Works ShmBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                   const c10d::ReduceScatterOptions& options) {
  return work({reduce_scatter_one(output, input, options.reduceOp)}, c10d::OpType::_REDUCE_SCATTER_BASE,
              {output}, options.timeout);
}

ShmBackend::Works ShmBackend::reduce_scatter_with_squares(const at::Tensor& output, const at::Tensor& input,
                                                          std::shared_ptr<double> squares,
                                                          std::chrono::milliseconds timeout) {
  return work({reduce_scatter_one(output, input, c10d::ReduceOp::SUM, std::move(squares))},
              c10d::OpType::_REDUCE_SCATTER_BASE, {output}, timeout);
}

ShmBackend::Works ShmBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                              const c10d::ReduceScatterOptions& options) {
  arguments("reduce_scatter").as_many(outputs.size(), inputs.size());
  return several(inputs.size(), torch_versions::kReduceScatterCoalesced, outputs, options.timeout,
                 [&](std::size_t i) { return reduce_scatter_one(outputs[i], inputs[i], options.reduceOp); });
}

ShmBackend::Works ShmBackend::gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  const auto check = arguments("gather");
  const at::Tensor& input = check.only(inputs);
  const int root = check.root(options.rootRank);
  std::vector<Region> places;
  Tensors used{input}, results;
  if (rank_ == root) {
    places = check.list(check.one_list(outputs), input, input.numel());
    check.check_disjoint(check.piece(input), places);
    results = outputs[0];
    used.insert(used.end(), results.begin(), results.end());
  }
  return work({start(shm::gather(check.piece(input), std::move(places), input.numel(), code_of(input), root),
                     std::move(used))},
              c10d::OpType::GATHER, std::move(results), options.timeout);
}

ShmBackend::Works ShmBackend::scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) {
  const auto check = arguments("scatter");
  const at::Tensor& output = check.only(outputs);
  const int root = check.root(options.rootRank);
  std::vector<Region> pieces;
  Tensors used{output};
  if (rank_ == root) {
    pieces = check.list(check.one_list(inputs), output, output.numel());
    check.check_disjoint(check.piece(output), pieces);
    used.insert(used.end(), inputs[0].begin(), inputs[0].end());
  }
  return work({start(shm::scatter(check.piece(output), std::move(pieces), output.numel(), code_of(output),
                                  root, size_),
                     std::move(used))},
              c10d::OpType::SCATTER, outputs, options.timeout);
}

ShmBackend::Works ShmBackend::alltoall_base(at::Tensor& output, at::Tensor& input, Splits& output_splits,
                                            Splits& input_splits, const c10d::AllToAllOptions& options) {
  const auto check = arguments("all_to_all");
  check.same_type(output, input);
  auto places = check.cut_rows(output, output_splits);
  auto pieces = check.cut_rows(input, input_splits);
  check.check_disjoint(pieces, places);
  return work({start(shm::all_to_all(std::move(places), std::move(pieces), code_of(input)), {output, input})},
              c10d::OpType::ALLTOALL_BASE, {output}, options.timeout);
}

ShmBackend::Works ShmBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                       const c10d::AllToAllOptions& options) {
  const auto check = arguments("all_to_all");
  check.one_for_each(inputs);
  auto places = check.list(outputs, inputs[0]);
  auto pieces = check.list(inputs, inputs[0]);
  check.check_disjoint(pieces, places);
  Tensors used = outputs;
  used.insert(used.end(), inputs.begin(), inputs.end());
  return work(
      {start(shm::all_to_all(std::move(places), std::move(pieces), code_of(inputs[0])), std::move(used))},
      c10d::OpType::ALLTOALL, outputs, options.timeout);
}

ShmBackend::Works ShmBackend::send(Tensors& tensors, int to, int tag) {
  const auto check = arguments("send");
  const at::Tensor& tensor = check.only(tensors);
  const Region piece = check.piece(tensor);
  return work({start(std::make_shared<shm::Send>(piece.data, piece.bytes, tensor.numel(), code_of(tensor),
                                                 check.peer(to), tag),
                     tensors)},
              c10d::OpType::SEND, {}, c10d::kUnsetTimeout);
}

ShmBackend::Task ShmBackend::receive_one(const Tensors& tensors, int from, int tag) {
  const auto check = arguments("recv");
  const at::Tensor& tensor = check.only(tensors);
  const Region piece = check.piece(tensor);
  return start(std::make_shared<shm::Receive>(piece.data, piece.bytes, tensor.numel(), code_of(tensor),
                                              from < 0 ? from : check.peer(from), tag),
               tensors);
}

ShmBackend::Works ShmBackend::recv(Tensors& tensors, int from, int tag) {
  arguments("recv").peer(from);
  return work({receive_one(tensors, from, tag)}, c10d::OpType::RECV, tensors, c10d::kUnsetTimeout);
}

ShmBackend::Works ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  return work({receive_one(tensors, -1, tag)}, c10d::OpType::RECVANYSOURCE, tensors, c10d::kUnsetTimeout);
}

ShmBackend::Works ShmBackend::allreduce_sparse(Tensors&, const c10d::AllreduceOptions&) {
  arguments("all_reduce").refuse("sparse tensors", "dense ones", "Call to_dense() first");
}

at::Tensor ShmBackend::allocate(std::int64_t numel, at::ScalarType dtype, shm::Engine::Copies copies) {
  const bool one = copies == shm::Engine::Copies::kOne;
  const auto width = static_cast<std::int64_t>(c10::elementSize(dtype));
  if (numel < 0 || numel > (std::int64_t{1} << 60) / (width * size_)) {
    refuse(fmt::format("{} of group '{}'", one ? "host_shared" : "empty_shared", name_),
           fmt::format("{} elements of {} bytes", numel, width), "a size that memory can have",
           "Check how the size was computed");
  }
  auto allocation = engine_->allocate(static_cast<std::uint64_t>(numel * width), copies,
                                      static_cast<std::int8_t>(dtype), numel, timeout_);
  std::byte* data = one ? allocation->data(0) : allocation->own();
  return at::from_blob(
      data, {numel}, [allocation](void*) { allocation->release(); }, at::TensorOptions(dtype));
}

at::Tensor ShmBackend::empty_shared(std::int64_t numel, at::ScalarType dtype) {
  return allocate(numel, dtype, shm::Engine::Copies::kPerRank);
}

at::Tensor ShmBackend::host_shared(std::int64_t numel, at::ScalarType dtype) {
  return allocate(numel, dtype, shm::Engine::Copies::kOne);
}

}  // namespace isograd
