// The process's heap.
#pragma once

#include <features.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace isograd {

// Returns freed memory that the allocator keeps to the system. glibc keeps blocks of up to 32 MiB for reuse,
// and where long-lived memory was allocated behind them they stay for good. Call it after large allocations
// that no step repeats: initial values, checkpoints.
inline void return_freed_memory() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

// For training processes: every step reuses the memory that the previous step freed. By default glibc returns
// some of it to the system in between, which then zeroes it page by page. After this call glibc keeps up to 1
// GiB; return_freed_memory() returns that too.
inline void keep_freed_memory() {
#ifdef __GLIBC__
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // glibc's own maximum; larger blocks are mapped
#endif
}

}  // namespace isograd
