// Waits by polling, for MPI and for two backends at once: neither can wake a sleeper.
#pragma once

#include <chrono>
#include <functional>

namespace isograd {

// Calls `done` until it returns true: spins, yields, then naps of up to 1 ms. False after `timeout`.
bool poll_until(const std::function<bool()>& done, std::chrono::milliseconds timeout);

}  // namespace isograd
