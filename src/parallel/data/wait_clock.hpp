// How long communication took that no computation hid: DataParallel::exposed_seconds().
#pragma once

#include <chrono>

namespace isograd {

// Adds up the time spent waiting. What is measured inside of what is measured counts once.
class WaitClock {
 public:
  template <typename Action>
  void during(Action&& action) {
    if (running_) return action();
    const Running running(running_);
    const auto start = std::chrono::steady_clock::now();
    action();
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  double seconds() const { return seconds_; }

 private:
  struct Running {  // until an exception, too
    explicit Running(bool& flag_) : flag(flag_) { flag = true; }
    ~Running() { flag = false; }
    bool& flag;
  };
  bool running_ = false;
  double seconds_ = 0;
};

}  // namespace isograd
