// A thread that moves on what nobody waits for: a c10d Future completes by itself, as its users expect
// (PyTorch's DDP). Started by the first future; isograd itself needs none.
#pragma once

#include <functional>
#include <memory>

#include "comm/shm/engine.hpp"

namespace isograd::shm {

// Calls `poll` from a thread of its own until it returns true; it moves `engine` and must not throw.
void poll_in_background(std::shared_ptr<Engine> engine, std::function<bool()> poll);

// For a process that is about to end: returns when nothing is polled any more. What is left stays as it is.
// A program whose futures call back into an interpreter must call this while that still runs.
void stop_background();

}  // namespace isograd::shm
