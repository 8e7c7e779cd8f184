// ShmWork: c10d's handle of operations under way.
#pragma once

#include <ATen/core/ivalue.h>

#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "comm/shm/engine.hpp"

namespace isograd {

// progress() and wait() do the work, of these tasks and of all others of the rank that are under way. Nothing
// runs in the background unless getFuture() is called, which starts a thread.
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
