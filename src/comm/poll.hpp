// Waits by polling, for MPI and for two backends at once: neither can wake a sleeper.
#pragma once

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>

namespace isograd {

// Calls `done` until it returns true: spins, yields, then naps of up to 1 ms. False after `timeout`.
inline bool poll_until(const std::function<bool()>& done, std::chrono::milliseconds timeout) {
  constexpr int kSpins = 64;
  constexpr auto kYieldTime = std::chrono::milliseconds(1);
  constexpr auto kLongestNap = std::chrono::microseconds(1000);
  for (int i = 0; i < kSpins; ++i) {
    if (done()) return true;
  }
  const auto begin = std::chrono::steady_clock::now();
  auto nap = std::chrono::microseconds(20);
  for (;;) {
    if (done()) return true;
    const auto waited = std::chrono::steady_clock::now() - begin;
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
