#include "comm/launch_signals.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "base/refuse.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

// One counter for each of kForwardedSignals. The pipe wakes the loop.
std::atomic<int> arrived[3];
std::atomic<int> wake_pipe{-1};

void on_signal(int signal) {
  const int kept = errno;
  for (int i = 0; i < 3; ++i) {
    if (kForwardedSignals[i] == signal) arrived[i].fetch_add(1);
  }
  const char byte = 0;
  if (wake_pipe.load() >= 0) (void)!::write(wake_pipe.load(), &byte, 1);
  errno = kept;
}

}  // namespace

SignalScope::SignalScope() {
  if (::pipe2(pipe_, O_CLOEXEC | O_NONBLOCK) != 0) {
    refuse("starting ranks", fmt::format("no pipe: {}", std::strerror(errno)), "a few free file descriptors",
           "Raise the limit on open files (ulimit -n)");
  }
  for (auto& count : arrived) count = 0;
  wake_pipe = pipe_[1];
  struct sigaction action {};
  action.sa_handler = on_signal;
  sigemptyset(&action.sa_mask);
  for (int i = 0; i < 3; ++i) {
    ::sigaction(kForwardedSignals[i], &action, &before_[i]);
    // nohup: the ranks must survive the hang-up too.
    if (kForwardedSignals[i] == SIGHUP && before_[i].sa_handler == SIG_IGN)
      ::sigaction(SIGHUP, &before_[i], nullptr);
  }
  action.sa_handler = SIG_DFL;  // if it were ignored, waitpid() could not report how a rank ended
  ::sigaction(SIGCHLD, &action, &child_before_);
  action.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &action, &pipe_before_);
}

SignalScope::~SignalScope() {
  for (int i = 0; i < 3; ++i) ::sigaction(kForwardedSignals[i], &before_[i], nullptr);
  ::sigaction(SIGCHLD, &child_before_, nullptr);
  ::sigaction(SIGPIPE, &pipe_before_, nullptr);
  wake_pipe = -1;
  ::close(pipe_[0]);
  ::close(pipe_[1]);
}

void SignalScope::take(const std::function<void(int signal)>& pass_on) {
  char bytes[64];
  while (::read(pipe_[0], bytes, sizeof(bytes)) > 0) {
  }
  for (int i = 0; i < 3; ++i) {
    for (int n = arrived[i].exchange(0); n > 0; --n) pass_on(kForwardedSignals[i]);
  }
}

}  // namespace isograd
