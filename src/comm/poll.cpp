#include "comm/poll.hpp"

#include <sched.h>

#include <algorithm>
#include <thread>

namespace isograd {
namespace {
using Clock = std::chrono::steady_clock;
}

bool poll_until(const std::function<bool()>& done, std::chrono::milliseconds timeout) {
  constexpr int kSpins = 64;
  constexpr auto kYieldTime = std::chrono::milliseconds(1);
  constexpr auto kLongestNap = std::chrono::microseconds(1000);
  for (int i = 0; i < kSpins; ++i) {
    if (done()) return true;
  }
  const auto begin = Clock::now();
  auto nap = std::chrono::microseconds(20);
  for (;;) {
    if (done()) return true;
    const auto waited = Clock::now() - begin;
    if (waited >= timeout) return false;
    if (waited < kYieldTime) {
      ::sched_yield();
    } else {
      std::this_thread::sleep_for(nap);
      nap = std::min(2 * nap, kLongestNap);
    }
  }
}

}  // namespace isograd
