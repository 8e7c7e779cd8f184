#include "train/stop.hpp"

#include <csignal>
#include <ctime>

#include <array>
#include <atomic>
#include <mutex>

namespace isograd {
namespace {

std::atomic<bool> asked{false};
std::atomic<long long> asked_at_ms{0};
static_assert(std::atomic<long long>::is_always_lock_free && std::atomic<bool>::is_always_lock_free);

std::mutex guard;
int holders = 0;
// The first three ask for a stop; the others become errors of the write that caused them.
constexpr std::array kSignals = {SIGINT, SIGTERM, SIGHUP, SIGXFSZ, SIGPIPE};
std::array<struct sigaction, kSignals.size()> before;

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
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;  // writes to files are not interrupted
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    action.sa_handler = i < 3 ? on_signal : SIG_IGN;
    sigaction(kSignals[i], &action, &before[i]);
    if (kSignals[i] == SIGHUP && before[i].sa_handler == SIG_IGN) sigaction(SIGHUP, &before[i], nullptr);
  }
}

StopSignals::~StopSignals() {
  std::lock_guard<std::mutex> lock(guard);
  if (--holders > 0) return;
  for (std::size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &before[i], nullptr);
}

bool StopSignals::requested() { return asked.load(std::memory_order_relaxed); }

}  // namespace isograd
