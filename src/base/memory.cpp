#include "base/memory.hpp"

#include <features.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace isograd {

void return_freed_memory() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

void keep_freed_memory() {
#ifdef __GLIBC__
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // glibc's own maximum; larger blocks are mapped
#endif
}

}  // namespace isograd
