// The process's heap.
#pragma once

#include <features.h>

#include <atomic>
#include <cstddef>
#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace isograd {

// Returns freed memory that the allocator keeps to the system. glibc keeps blocks of up to 32 MiB for reuse,
// and where long-lived memory was allocated behind them they stay for good. Call it after large allocations
// that no step repeats (initial values, checkpoints) with their bytes: it looks through the whole heap, so it
// waits until the calls of all ranks in the process come to 16 MiB.
inline void return_freed_memory(std::size_t freed) {
#ifdef __GLIBC__
  static std::atomic<std::size_t> kept{0};
  if ((kept += freed) < 16 << 20) return;
  kept = 0;
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
