// Signals that a launcher passes on to the ranks.
#pragma once

#include <signal.h>

#include <functional>

namespace isograd {

inline constexpr int kForwardedSignals[] = {SIGINT, SIGTERM, SIGHUP};

// Catches kForwardedSignals while it lives, and ignores SIGPIPE: ranks do not end because nobody reads what
// their launcher passes on. One at a time in a process.
class SignalScope {
 public:
  SignalScope();
  ~SignalScope();
  SignalScope(const SignalScope&) = delete;
  SignalScope& operator=(const SignalScope&) = delete;
  // For poll(): readable once a signal has arrived.
  int readable() const { return pipe_[0]; }
  // Calls `pass_on` once for each signal that has arrived since.
  void take(const std::function<void(int signal)>& pass_on);

 private:
  int pipe_[2] = {-1, -1};
  struct sigaction before_[3]{};
  struct sigaction child_before_ {};
  struct sigaction pipe_before_ {};
};

}  // namespace isograd
