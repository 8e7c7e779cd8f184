// The process's own memory.
#pragma once

namespace isograd {

// Gives back to the system what was freed and the allocator keeps: glibc keeps blocks of up to 32 MiB for the
// next allocation of their size, and where long-lived memory was allocated behind them they stay in memory
// for good. For the ends of what allocates much that no step will ask for again: initial values, checkpoints.
void return_freed_memory();

// For a process that trains: every step asks for the memory that the one before has freed, and glibc, left
// alone, hands some of it to the system in between, which zeroes it page by page when it is asked for again.
// From here on it keeps up to 1 GiB of it; return_freed_memory() gives that back too.
void keep_freed_memory();

}  // namespace isograd
