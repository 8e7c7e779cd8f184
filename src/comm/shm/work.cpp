#include "comm/shm/work.hpp"

#include <sched.h>
#include <unistd.h>

#include <condition_variable>
#include <functional>
#include <thread>

namespace isograd {
namespace shm {
namespace {

// Advances `engine`. Called until it returns true; must not throw.
struct Item {
  std::shared_ptr<Engine> engine;
  std::function<bool()> poll;
};

// Advances operations for which nobody waits. A c10d Future must complete by itself (PyTorch's DDP expects
// that). The first future starts the thread; isograd itself needs none.
class ProgressThread {
 public:
  void add(Item item) {
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) return;
      arrived_.push_back(std::move(item));
      if (process_ != ::getpid()) {  // the first call, or the first after a fork, which copies no threads
        process_ = ::getpid();
        std::thread([this] { run(); }).detach();
      }
    }
    wake_.notify_one();
  }

  void stop() {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    wake_.notify_one();
    if (process_ == ::getpid()) stopped_signal_.wait(lock, [&] { return stopped_; });
  }

 private:
  void run() {
    using SteadyClock = std::chrono::steady_clock;
    std::vector<Item> items;
    auto last_moved = SteadyClock::now();
    for (;;) {
      {
        std::unique_lock lock(mutex_);
        if (items.empty()) wake_.wait(lock, [&] { return stopping_ || !arrived_.empty(); });
        if (stopping_) {
          new auto(std::move(items));  // never freed: their callbacks' owners may already be destroyed
          stopped_ = true;
          stopped_signal_.notify_all();
          return;
        }
        for (Item& item : arrived_) items.push_back(std::move(item));
        arrived_.clear();
      }
      if (std::erase_if(items, [](Item& item) { return item.poll(); }) > 0) {
        last_moved = SteadyClock::now();
      } else if (SteadyClock::now() - last_moved < std::chrono::microseconds(50)) {
        ::sched_yield();
      } else {
        // New items and other groups do not ring this bell, so the sleep is short.
        items.front().engine->nap(std::chrono::microseconds(items.size() > 1 ? 200 : 500));
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Item> arrived_;
  pid_t process_ = -1;
  std::condition_variable stopped_signal_;
  bool stopping_ = false, stopped_ = false;
};

// Outlives every static destructor, because its thread is not joined.
ProgressThread& background() {
  static auto* thread = new ProgressThread;
  return *thread;
}

}  // namespace

void stop_background() { background().stop(); }

}  // namespace shm

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
  for (const auto& task : tasks_)
    if (!engine_->progress(*task, timeout_)) return false;
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
      shm::background().add({engine_, [self] { return self->isCompleted(); }});
    }
  }
  return future_;
}

int ShmWork::sourceRank() const { return tasks_.empty() ? c10d::Work::sourceRank() : tasks_[0]->source(); }

std::uint64_t ShmWork::getSequencenumber() const { return tasks_.empty() ? 0 : tasks_[0]->number(); }

}  // namespace isograd
