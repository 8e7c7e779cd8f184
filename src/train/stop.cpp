#include "train/stop.hpp"

#include <csignal>
#include <ctime>

#include <atomic>
#include <mutex>

namespace isograd {
namespace {

std::atomic<bool> asked{false};
std::atomic<long long> asked_at_ms{0};
static_assert(std::atomic<long long>::is_always_lock_free && std::atomic<bool>::is_always_lock_free);

std::mutex guard;
int holders = 0;
struct sigaction old_interrupt, old_terminate, old_hang_up, old_file_size, old_pipe;

long long now_ms() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);  // async-signal-safe
  return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

extern "C" void on_signal(int signal) {
  if (!asked.exchange(true)) {
    asked_at_ms = now_ms();
  } else if (now_ms() - asked_at_ms >= 1000) {
    std::signal(signal, SIG_DFL);
    std::raise(signal);
  }
}

}  // namespace

StopSignals::StopSignals() {
  std::lock_guard<std::mutex> lock(guard);
  if (holders++ > 0) return;
  asked = false;
  struct sigaction action {};
  action.sa_handler = on_signal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;  // writes to files are not interrupted
  sigaction(SIGINT, &action, &old_interrupt);
  sigaction(SIGTERM, &action, &old_terminate);
  sigaction(SIGHUP, &action, &old_hang_up);
  if (old_hang_up.sa_handler == SIG_IGN) sigaction(SIGHUP, &old_hang_up, nullptr);
  action.sa_handler = SIG_IGN;
  sigaction(SIGXFSZ, &action, &old_file_size);
  sigaction(SIGPIPE, &action, &old_pipe);
}

StopSignals::~StopSignals() {
  std::lock_guard<std::mutex> lock(guard);
  if (--holders > 0) return;
  sigaction(SIGINT, &old_interrupt, nullptr);
  sigaction(SIGTERM, &old_terminate, nullptr);
  sigaction(SIGHUP, &old_hang_up, nullptr);
  sigaction(SIGXFSZ, &old_file_size, nullptr);
  sigaction(SIGPIPE, &old_pipe, nullptr);
}

bool StopSignals::requested() {
  return asked.load(std::memory_order_relaxed);
}

}  // namespace isograd
