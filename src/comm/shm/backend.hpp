// ShmBackend: collectives over shared memory between the ranks of one host. It is a c10d backend, so isograd
// and PyTorch use the same one. Ranks are processes, or threads of one process; the code is the same.
#pragma once

#include <ATen/ops/from_blob.h>
#include <fmt/format.h>

#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "base/refuse.hpp"
#include "comm/checked_backend.hpp"
#include "comm/shm/engine.hpp"
#include "comm/shm/work.hpp"

namespace isograd {

// Tensors are contiguous and on the CPU. Reductions, in rank order: SUM, MAX, MIN, PRODUCT and, for PyTorch,
// AVG, PREMUL_SUM, BAND, BOR and BXOR. 16-bit floats accumulate in float32. Copies: any type. Anything else
// is a ConfigError that names what is supported.
class ShmBackend final : public CheckedBackend<std::shared_ptr<shm::Task>> {
 public:
  // Collective. Groups that share a store need different names. `timeout` limits joining and is the default
  // of every wait.
  ShmBackend(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::string name,
             std::chrono::milliseconds timeout, shm::EngineOptions options = {})
      : CheckedBackend(rank, size, std::move(name), "shm", /*uneven_at_root=*/false),
        store_(c10::make_intrusive<c10d::PrefixStore>("shm/" + name_, std::move(store))),
        timeout_(timeout),
        engine_(std::make_shared<shm::Engine>(*store_, rank, size, name_, timeout, std::move(options))) {}

  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  void setSequenceNumberForGroup() override {}  // every collective carries its own number
  std::uint64_t getSequenceNumberForGroup() override { return engine_->sequence(); }

  // _reduce_scatter_base of a sum; `squares` becomes Σ x² over `output` (fp32, fp64, bf16).
  Works reduce_scatter_with_squares(const at::Tensor& output, const at::Tensor& input,
                                    std::shared_ptr<double> squares, std::chrono::milliseconds timeout) {
    const Call check = call("reduce_scatter");
    check.piece(output);
    return run(check,
               {reduce_scattered(check, output, {{input}, check.cut(input, output)},
                                 check.reduction(input, c10d::ReduceOp::SUM), std::move(squares))},
               OpType::_REDUCE_SCATTER_BASE, {output}, timeout);
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
  using Kind = shm::Kind;
  static std::int8_t code_of(const at::Tensor& tensor) {
    return static_cast<std::int8_t>(tensor.scalar_type());
  }
  static Region region_of(const at::Tensor& tensor) {
    return {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()};
  }
  static shm::Fingerprint print_of(Kind kind, const at::Tensor& tensor, int root = 0) {
    if (root == kAllRanks && kind == Kind::kReduce) kind = Kind::kAllReduce, root = 0;
    if (root == kAllRanks && kind == Kind::kGather) kind = Kind::kAllGather, root = 0;
    return {.kind = kind, .dtype = code_of(tensor), .root = root, .count = tensor.numel()};
  }
  // `used` and `more` are kept alive until the task is complete.
  static Task made(Task task, Tensors used, const Tensors& more = {}) {
    used.insert(used.end(), more.begin(), more.end());
    task->keep_alive = std::make_shared<Tensors>(std::move(used));
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
  Works run(const Call&, Steps tasks, OpType type, Tensors results, std::chrono::milliseconds timeout,
            int /*peer*/ = kAnyRank) override {
    for (const Task& task : tasks) engine_->start(task);
    return c10::make_intrusive<ShmWork>(engine_, std::move(tasks), rank_, type, std::move(results),
                                        timeout == c10d::kUnsetTimeout ? timeout_ : timeout);
  }
  Task make_reduce(const at::Tensor& tensor, const shm::Reduction& reduction, int root) override {
    return made(shm::reduce(print_of(Kind::kReduce, tensor, root), region_of(tensor), reduction), {tensor});
  }
  Task make_broadcast(const Call&, const at::Tensor& tensor, int root) override {
    return made(
        shm::broadcast(print_of(Kind::kBroadcast, tensor, root), region_of(tensor), size_, rank_ == root),
        {tensor});
  }
  Task make_gather(const Call& check, const at::Tensor& input, Parts outputs, int root) override {
    check.disjoint(region_of(input), outputs.by_rank);
    const shm::Fingerprint print = print_of(Kind::kGather, input, root);
    return made(shm::gather(print, region_of(input), std::move(outputs.by_rank)), std::move(outputs.tensors),
                {input});
  }
  Task make_reduce_scatter(const Call& check, const at::Tensor& output, Parts inputs,
                           const shm::Reduction& reduction) override {
    return reduce_scattered(check, output, std::move(inputs), reduction, nullptr);
  }
  // The output may be this rank's own part of the input, because no peer reads that.
  static Task reduce_scattered(const Call& check, const at::Tensor& output, Parts inputs,
                               const shm::Reduction& reduction, std::shared_ptr<double> squares) {
    check.disjoint(region_of(output), inputs.by_rank);
    return made(shm::reduce_scatter(print_of(Kind::kReduceScatter, output), std::move(inputs.by_rank),
                                    region_of(output), reduction, std::move(squares)),
                std::move(inputs.tensors), {output});
  }
  Task make_scatter(const Call& check, const at::Tensor& output, Parts inputs, int root) override {
    check.disjoint(region_of(output), inputs.by_rank);
    return made(shm::scatter(print_of(Kind::kScatter, output, root), region_of(output),
                             std::move(inputs.by_rank), size_),
                std::move(inputs.tensors), {output});
  }
  Task make_all_to_all(const Call& check, Parts outputs, Parts inputs) override {
    check.disjoint(inputs.by_rank, outputs.by_rank);
    const shm::Fingerprint print{.kind = Kind::kAllToAll, .dtype = code_of(inputs.tensors[0])};
    return made(shm::all_to_all(print, std::move(outputs.by_rank), std::move(inputs.by_rank)),
                std::move(outputs.tensors), inputs.tensors);
  }
  Task make_send(const Call&, const at::Tensor& tensor, int to, int tag) override {
    return made(shm::send(print_of(Kind::kSend, tensor, to), region_of(tensor), tag), {tensor});
  }
  Task make_recv(const Call&, const at::Tensor& tensor, int from, int tag) override {
    return made(shm::receive(print_of(Kind::kReceive, tensor, from), region_of(tensor), tag), {tensor});
  }
  Task make_barrier() override { return made(shm::barrier(), {}); }

  c10::intrusive_ptr<c10d::Store> store_;  // where rank 0 hosts it, it must live until all have joined
  std::chrono::milliseconds timeout_;
  std::shared_ptr<shm::Engine> engine_;
};

}  // namespace isograd
