#include "comm/shm/work.hpp"

#include "comm/shm/progress_thread.hpp"

namespace isograd {

ShmWork::ShmWork(std::shared_ptr<shm::Engine> engine, Tasks tasks, int rank, c10d::OpType type,
                 std::vector<at::Tensor> results, std::chrono::milliseconds timeout)
    : c10d::Work(rank, type),
      engine_(std::move(engine)),
      tasks_(std::move(tasks)),
      results_(std::move(results)),
      timeout_(timeout) {}

// Takes effect once: the waiting thread and the future's thread may both call it.
void ShmWork::end(std::exception_ptr error) {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock(future_mutex_);
    if (!c10d::Work::isCompleted()) finish(error);
    if (future_ && !future_ended_) future = future_;
    future_ended_ = future_ended_ || future;
  }
  if (!future) return;
  if (const auto failure = exception()) {
    future->setError(failure);
  } else {
    future->markCompleted(c10::IValue(results_));
  }
}

bool ShmWork::progress() {
  if (auto error = exception()) std::rethrow_exception(error);
  if (c10d::Work::isCompleted()) return true;
  for (const auto& task : tasks_) {
    if (!engine_->progress(*task, timeout_)) return false;
  }
  end();
  return true;
}

bool ShmWork::isCompleted() {
  if (c10d::Work::isCompleted()) return true;
  try {
    return progress();
  } catch (...) {
    end(std::current_exception());
    return true;
  }
}

bool ShmWork::isSuccess() const {
  return const_cast<ShmWork*>(this)->c10d::Work::isCompleted() && !exception();
}

bool ShmWork::wait(std::chrono::milliseconds timeout) {
  if (auto error = exception()) std::rethrow_exception(error);
  if (c10d::Work::isCompleted()) return true;
  try {
    for (const auto& task : tasks_) engine_->wait(*task, timeout == kNoTimeout ? timeout_ : timeout);
  } catch (...) {
    end(std::current_exception());
    throw;
  }
  end();
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> ShmWork::getFuture() {
  bool first = false;
  {
    const std::lock_guard lock(future_mutex_);
    first = !future_;
    if (first)
      future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  }
  if (first) {
    if (isCompleted()) {
      end();
    } else {
      // The work must outlive its operation even if the caller drops it.
      auto self = c10::intrusive_ptr<ShmWork>::reclaim_copy(this);
      shm::poll_in_background(engine_, [self] { return self->isCompleted(); });
    }
  }
  return future_;
}

int ShmWork::sourceRank() const {
  const auto* receive = tasks_.empty() ? nullptr : dynamic_cast<const shm::Receive*>(tasks_[0].get());
  return receive ? receive->source() : c10d::Work::sourceRank();
}

std::uint64_t ShmWork::getSequencenumber() const {
  return tasks_.empty() ? 0 : tasks_[0]->number();
}

}  // namespace isograd
