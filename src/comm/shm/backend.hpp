// ShmBackend: collectives over shared memory between the ranks of one host, as a c10d backend, so that
// isograd and PyTorch use it alike. Ranks are processes or threads of one process; the code is the same.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "comm/shm/engine.hpp"

namespace isograd {

// A collective under way. Nothing happens behind the caller's back: progress() and wait() do the work, of
// this operation and of all others of the rank that are under way.
class ShmWork final : public c10d::Work {
 public:
  ShmWork(std::shared_ptr<shm::Engine> engine, std::shared_ptr<shm::Operation> operation, int rank,
          c10d::OpType type, std::vector<at::Tensor> results, std::chrono::milliseconds timeout);
  // True once complete. Throws PeerError.
  bool progress();
  bool isCompleted() override;  // progress(), with an error kept for wait() and exception()
  bool isSuccess() const override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  std::vector<at::Tensor> result() override { return results_; }
  std::uint64_t getSequencenumber() const override;

 private:
  std::shared_ptr<shm::Engine> engine_;
  std::shared_ptr<shm::Operation> operation_;
  std::vector<at::Tensor> results_;
  std::chrono::milliseconds timeout_;
};

// Tensors are contiguous and on the CPU. Reductions: SUM, MAX, MIN of float64, float32, bfloat16, float16
// (the latter two accumulate in float32), int64, int32, uint8; in rank order. Copies: any type. Anything else
// is a ConfigError that names what is supported.
class ShmBackend final : public c10d::Backend {
 public:
  // Collective. Groups that share a store have different names. `timeout` is that of joining and the default
  // of every wait.
  ShmBackend(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::string name,
             std::chrono::milliseconds timeout, shm::EngineOptions options = {});

  const std::string getBackendName() const override { return "shm"; }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }

  using Works = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  Works allreduce(Tensors& tensors, const c10d::AllreduceOptions& options = {}) override;
  Works broadcast(Tensors& tensors, const c10d::BroadcastOptions& options = {}) override;
  Works allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                  const c10d::AllgatherOptions& options = {}) override;
  Works _allgather_base(at::Tensor& output, at::Tensor& input,
                        const c10d::AllgatherOptions& options = {}) override;
  Works _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                             const c10d::ReduceScatterOptions& options = {}) override;
  Works barrier(const c10d::BarrierOptions& options = {}) override;

  // Refused, naming what there is.
  Works allreduce_sparse(Tensors&, const c10d::AllreduceOptions&) override;
  Works allreduce_coalesced(Tensors&, const c10d::AllreduceCoalescedOptions&) override;
  Works reduce(Tensors&, const c10d::ReduceOptions&) override;
  Works allgather_coalesced(std::vector<Tensors>&, Tensors&, const c10d::AllgatherOptions&) override;
  Works allgather_into_tensor_coalesced(Tensors&, Tensors&, const c10d::AllgatherOptions&) override;
  Works gather(std::vector<Tensors>&, Tensors&, const c10d::GatherOptions&) override;
  Works scatter(Tensors&, std::vector<Tensors>&, const c10d::ScatterOptions&) override;
  Works reduce_scatter(Tensors&, std::vector<Tensors>&, const c10d::ReduceScatterOptions&) override;
  Works reduce_scatter_tensor_coalesced(Tensors&, Tensors&, const c10d::ReduceScatterOptions&) override;
  Works alltoall_base(at::Tensor&, at::Tensor&, std::vector<std::int64_t>&, std::vector<std::int64_t>&,
                      const c10d::AllToAllOptions&) override;
  Works alltoall(Tensors&, Tensors&, const c10d::AllToAllOptions&) override;
  Works send(Tensors&, int, int) override;
  Works recv(Tensors&, int, int) override;
  Works recvAnysource(Tensors&, int) override;

  // Collective: a flat zero-filled tensor in memory that every rank reaches.
  at::Tensor empty_shared(std::int64_t numel, at::ScalarType dtype);
  void poison(const std::string& reason) noexcept { engine_->poison(reason); }

 private:
  Works start(std::shared_ptr<shm::Operation> operation, c10d::OpType type, Tensors used, Tensors results,
              std::chrono::milliseconds timeout);
  // ConfigError unless the tensor can be used as raw memory.
  void check(const at::Tensor& tensor, const char* operation) const;
  const at::Tensor& only(const Tensors& tensors, const char* operation) const;
  [[noreturn]] void refuse(const char* operation) const;

  c10::intrusive_ptr<c10d::Store> store_;  // where rank 0 hosts it, it must last until all have joined
  std::string name_;
  std::chrono::milliseconds timeout_;
  std::shared_ptr<shm::Engine> engine_;
};

}  // namespace isograd
