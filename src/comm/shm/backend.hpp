// ShmBackend: collectives over shared memory between the ranks of one host. It is a c10d backend, so isograd
// and PyTorch use the same one. Ranks are processes, or threads of one process; the code is the same.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "comm/shm/arguments.hpp"
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
             std::chrono::milliseconds timeout, shm::EngineOptions options = {});

  const std::string getBackendName() const override { return "shm"; }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  void setSequenceNumberForGroup() override {}  // every collective carries its own number
  std::uint64_t getSequenceNumberForGroup() override { return engine_->sequence(); }

  using Works = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<Tensors>;
  using Splits = std::vector<std::int64_t>;
  Works allreduce(Tensors& tensors, const c10d::AllreduceOptions& options = {}) override;
  Works allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options = {}) override;
  Works reduce(Tensors& tensors, const c10d::ReduceOptions& options = {}) override;
  Works broadcast(Tensors& tensors, const c10d::BroadcastOptions& options = {}) override;
  Works barrier(const c10d::BarrierOptions& options = {}) override;

  // The tensors of a list may differ in size, in the same way on all ranks.
  Works allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options = {}) override;
  Works _allgather_base(at::Tensor& output, at::Tensor& input,
                        const c10d::AllgatherOptions& options = {}) override;
  Works allgather_coalesced(Lists& outputs, Tensors& inputs,
                            const c10d::AllgatherOptions& options = {}) override;
  Works allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                        const c10d::AllgatherOptions& options = {}) override;
  Works reduce_scatter(Tensors& outputs, Lists& inputs,
                       const c10d::ReduceScatterOptions& options = {}) override;
  Works _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                             const c10d::ReduceScatterOptions& options = {}) override;
  // _reduce_scatter_base of a sum; `squares` becomes Σ x² over `output` (fp32, fp64, bf16).
  Works reduce_scatter_with_squares(const at::Tensor& output, const at::Tensor& input,
                                    std::shared_ptr<double> squares, std::chrono::milliseconds timeout);
  Works reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                        const c10d::ReduceScatterOptions& options = {}) override;

  Works gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options = {}) override;
  Works scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options = {}) override;
  Works alltoall_base(at::Tensor& output, at::Tensor& input, Splits& output_splits, Splits& input_splits,
                      const c10d::AllToAllOptions& options = {}) override;
  Works alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options = {}) override;

  // A receive takes messages of its tag only. Messages of one tag arrive in order.
  Works send(Tensors& tensors, int to, int tag) override;
  Works recv(Tensors& tensors, int from, int tag) override;
  Works recvAnysource(Tensors& tensors, int tag) override;

  Works allreduce_sparse(Tensors&, const c10d::AllreduceOptions&) override;  // refused

  // Collective: a flat zero-filled tensor in memory that every rank can read.
  at::Tensor empty_shared(std::int64_t numel, at::ScalarType dtype);
  // Collective: the same tensor on every rank. Collectives treat it as an ordinary tensor.
  at::Tensor host_shared(std::int64_t numel, at::ScalarType dtype);
  void poison(const std::string& reason) noexcept { engine_->poison(reason); }
  void abort() override { engine_->poison("the group was aborted"); }
  // The last operations of this rank, one per line.
  std::string history() { return engine_->history(); }

 private:
  using Task = std::shared_ptr<shm::Task>;
  // `used` is kept alive until the task is complete.
  Task start(Task task, Tensors used);
  at::Tensor allocate(std::int64_t numel, at::ScalarType dtype, shm::Engine::Copies copies);
  Works work(std::vector<Task> tasks, c10d::OpType type, Tensors results, std::chrono::milliseconds timeout);
  Works several(std::size_t count, c10d::OpType type, Tensors results, std::chrono::milliseconds timeout,
                const std::function<Task(std::size_t)>& start_one);
  Task all_reduce_one(const at::Tensor& tensor, const c10d::ReduceOp& op);
  Task all_gather_one(const at::Tensor& output, const at::Tensor& input);
  Task all_gather_list(const Tensors& outputs, const at::Tensor& input);
  Task reduce_scatter_one(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op,
                          std::shared_ptr<double> squares = nullptr);
  Task receive_one(const Tensors& tensors, int from, int tag);
  shm::Arguments arguments(const char* operation) const { return {operation, name_, rank_, size_}; }

  c10::intrusive_ptr<c10d::Store> store_;  // where rank 0 hosts it, it must live until all have joined
  std::string name_;
  std::chrono::milliseconds timeout_;
  std::shared_ptr<shm::Engine> engine_;
};

}  // namespace isograd
