// A thread that advances operations for which nobody waits. A c10d Future must complete by itself (PyTorch's
// DDP expects that). The first future starts the thread; isograd itself needs none.
#pragma once

#include <functional>
#include <memory>

#include "comm/shm/engine.hpp"

namespace isograd::shm {

// Calls `poll` from its own thread until it returns true. `poll` advances `engine` and must not throw.
void poll_in_background(std::shared_ptr<Engine> engine, std::function<bool()> poll);

// For a process that is about to end: returns when nothing is polled any more. Unfinished operations stay as
// they are. A program whose futures call back into an interpreter must call this while the interpreter runs.
void stop_background();

}  // namespace isograd::shm
