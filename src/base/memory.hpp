// The process's heap.
#pragma once

namespace isograd {

// Returns freed memory that the allocator keeps to the system. glibc keeps blocks of up to 32 MiB for reuse,
// and where long-lived memory was allocated behind them they stay for good. Call it after large allocations
// that no step repeats: initial values, checkpoints.
void return_freed_memory();

// For training processes: every step reuses the memory that the previous step freed. By default glibc returns
// some of it to the system in between, which then zeroes it page by page. After this call glibc keeps up to 1
// GiB; return_freed_memory() returns that too.
void keep_freed_memory();

}  // namespace isograd
