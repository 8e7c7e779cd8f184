#include <cstdint>

#include "kernels/versions.hpp"

namespace isograd {
namespace {

using kernels::processor_level;

ISOGRAD_ALWAYS_INLINE void triad_body(float* __restrict a, const float* __restrict b,
                                      const float* __restrict c, float s, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) a[i] = b[i] + s * c[i];
}

}  // namespace

void triad(float* a, const float* b, const float* c, float s, std::int64_t count);  // described in optim.cpp

ISOGRAD_VERSIONS(void, triad, (float* a, const float* b, const float* c, float s, std::int64_t count),
                 (a, b, c, s, count), triad_body(a, b, c, s, count))
}  // namespace isograd
