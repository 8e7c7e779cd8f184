// ShmBackend: collectives over shared memory between the ranks of one host. It is a c10d backend, so isograd
// and PyTorch use the same one. Ranks are processes, or threads of one process; the code is the same.
#pragma once

#include <ATen/core/ivalue.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "comm/checked_backend.hpp"
#include "comm/shm/engine.hpp"

namespace isograd {

// Tensors are contiguous and on the CPU. Reductions, in rank order: SUM, MAX, MIN, PRODUCT and, for PyTorch,
// AVG, PREMUL_SUM, BAND, BOR and BXOR. 16-bit floats accumulate in float32. Copies: any type. Anything else
// is a ConfigError that names what is supported.
class ShmBackend final : public CheckedBackend<std::shared_ptr<shm::Task>> {
 public:
  // Collective. Groups that share a store need different names. `timeout` limits joining and is the default
  // of every wait.
  ShmBackend(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::string name,
             std::chrono::milliseconds timeout, shm::EngineOptions options = {});

  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  void setSequenceNumberForGroup() override {}  // every collective carries its own number
  std::uint64_t getSequenceNumberForGroup() override { return engine_->sequence(); }

  // _reduce_scatter_base of a sum; `squares` becomes Σ x² over `output` (fp32, fp64, bf16).
  Works reduce_scatter_with_squares(const at::Tensor& output, const at::Tensor& input,
                                    std::shared_ptr<double> squares, std::chrono::milliseconds timeout);

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
  static shm::Fingerprint print_of(shm::Kind kind, const at::Tensor& tensor, int root = 0);
  at::Tensor allocate(std::int64_t numel, at::ScalarType dtype, shm::Engine::Copies copies);
  Works run(const Call&, Steps tasks, OpType type, Tensors results, std::chrono::milliseconds timeout,
            int peer = kAnyRank) override;
  Task make_reduce(const at::Tensor& tensor, const shm::Reduction& reduction, int root) override;
  Task make_broadcast(const Call&, const at::Tensor& tensor, int root) override;
  Task make_gather(const Call& check, const at::Tensor& input, Parts outputs, int root) override;
  Task make_reduce_scatter(const Call& check, const at::Tensor& output, Parts inputs,
                           const shm::Reduction& reduction) override;
  static Task reduce_scattered(const Call& check, const at::Tensor& output, Parts inputs,
                               const shm::Reduction& reduction, std::shared_ptr<double> squares);
  Task make_scatter(const Call& check, const at::Tensor& output, Parts inputs, int root) override;
  Task make_all_to_all(const Call& check, Parts outputs, Parts inputs) override;
  Task make_send(const Call&, const at::Tensor& tensor, int to, int tag) override;
  Task make_recv(const Call&, const at::Tensor& tensor, int from, int tag) override;
  Task make_barrier() override;

  c10::intrusive_ptr<c10d::Store> store_;  // where rank 0 hosts it, it must live until all have joined
  std::chrono::milliseconds timeout_;
  std::shared_ptr<shm::Engine> engine_;
};

// c10d's handle of operations under way. progress() and wait() do the work of these tasks and of all others
// of the rank that are under way. Nothing runs in the background unless getFuture() is called, which starts a
// thread.
class ShmWork final : public c10d::Work {
 public:
  using Tasks = std::vector<std::shared_ptr<shm::Task>>;
  ShmWork(std::shared_ptr<shm::Engine> engine, Tasks tasks, int rank, c10d::OpType type,
          std::vector<at::Tensor> results, std::chrono::milliseconds timeout);
  // True once complete. Throws PeerError.
  bool progress();
  bool isCompleted() override;  // progress(), with an error kept for wait() and exception()
  bool isSuccess() const override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  std::vector<at::Tensor> result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  int sourceRank() const override;
  std::uint64_t getSequencenumber() const override;

 private:
  void end(std::exception_ptr error = nullptr);

  std::shared_ptr<shm::Engine> engine_;
  Tasks tasks_;
  std::vector<at::Tensor> results_;
  std::chrono::milliseconds timeout_;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool future_ended_ = false;
};

namespace shm {

// For a process that is about to end: returns when no future is polled any more. Unfinished operations stay
// as they are. A program whose futures call back into an interpreter must call this while the interpreter
// runs.
void stop_background();

}  // namespace shm
}  // namespace isograd
