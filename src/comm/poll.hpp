// Waiting for what has nothing to sleep on: neither MPI nor two backends at once ring a bell.
#pragma once

#include <chrono>
#include <functional>

namespace isograd {

// Calls `done` until it is true: spins, yields, then naps of up to 1 ms. False when `timeout` is over.
bool poll_until(const std::function<bool()>& done, std::chrono::milliseconds timeout);

}  // namespace isograd
