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

}  // namespace isograd
