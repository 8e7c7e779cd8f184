// The signals that a launcher passes on to its ranks.
#pragma once

#include <signal.h>

#include <functional>

namespace isograd {

inline constexpr int kForwardedSignals[] = {SIGINT, SIGTERM, SIGHUP};

// Catches kForwardedSignals while it lives, and ignores SIGPIPE, so that ranks do not end because nobody
// reads the launcher's output. A process may have one at a time.
class SignalScope {
 public:
  SignalScope();
  ~SignalScope();
  SignalScope(const SignalScope&) = delete;
  SignalScope& operator=(const SignalScope&) = delete;
  // For poll(): readable once a signal has arrived.
  int readable() const { return pipe_[0]; }
  // Calls `pass_on` once for each signal that has arrived since the last call.
  void take(const std::function<void(int signal)>& pass_on);

 private:
  int pipe_[2] = {-1, -1};
  struct sigaction before_[3]{};
  struct sigaction child_before_ {};
  struct sigaction pipe_before_ {};
};

}  // namespace isograd
