#include "comm/shm/progress_thread.hpp"

#include <sched.h>
#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace isograd::shm {
namespace {

struct Item {
  std::shared_ptr<Engine> engine;
  std::function<bool()> poll;
};

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

void poll_in_background(std::shared_ptr<Engine> engine, std::function<bool()> poll) {
  background().add({std::move(engine), std::move(poll)});
}

void stop_background() {
  background().stop();
}

}  // namespace isograd::shm
