// The process's own memory.
#pragma once

namespace isograd {

// Gives back to the system what was freed and the allocator keeps: glibc keeps blocks of up to 32 MiB for the
// next allocation of their size, and where long-lived memory was allocated behind them they stay in memory
// for good. For the ends of what allocates much that no step will ask for again: initial values, checkpoints.
void return_freed_memory();

}  // namespace isograd
