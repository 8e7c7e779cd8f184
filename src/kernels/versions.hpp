// One function for several instruction sets. The best one for this processor is chosen at the first call. All
// versions give the same bits: no reassociation, no contraction (see CMakeLists.txt).
#pragma once

#include <string>

namespace isograd::kernels {

// 2: AVX-512, 1: AVX2 with FMA, 0: the baseline of the architecture. The best level of this processor, or
// that of the variable ISOGRAD_PROCESSOR (scalar, avx2, avx512); ConfigError if that is no level, or above
// the processor's. Only tests write it, to reach the other versions.
int& processor_level();
std::string processor_name();  // as the system names it, or "unknown"

}  // namespace isograd::kernels

// Marks a loop whose iterations are independent, whatever its pointers look like.
#if defined(__clang__)
#define ISOGRAD_INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define ISOGRAD_INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#else
#define ISOGRAD_INDEPENDENT_ITERATIONS
#endif

#if defined(__x86_64__) && defined(__GNUC__)
#define ISOGRAD_ALWAYS_INLINE inline __attribute__((always_inline))
#if defined(__clang__)  // a file option with clang (CMakeLists.txt)
#define ISOGRAD_VECTOR_WIDTH
#else
#define ISOGRAD_VECTOR_WIDTH ",prefer-vector-width=512"
#endif
#define ISOGRAD_AVX512 \
  __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512cd" ISOGRAD_VECTOR_WIDTH)))
#define ISOGRAD_AVX2 __attribute__((target("avx2,fma")))

// Defines `result name parameters`, which returns `body arguments` (an ISOGRAD_ALWAYS_INLINE function)
// compiled for this processor. `arguments` repeats the names of the parameters. It avoids ifunc, whose
// resolvers run before the sanitizers are ready.
#define ISOGRAD_VERSIONS(result, name, body, parameters, arguments)                   \
  ISOGRAD_AVX512 static result name##_on_avx512 parameters { return body arguments; } \
  ISOGRAD_AVX2 static result name##_on_avx2 parameters { return body arguments; }     \
  static result name##_on_any parameters { return body arguments; }                   \
  result name parameters {                                                            \
    const int level = processor_level();                                              \
    return level == 2   ? name##_on_avx512 arguments                                  \
           : level == 1 ? name##_on_avx2 arguments                                    \
                        : name##_on_any arguments;                                    \
  }
#else
#define ISOGRAD_ALWAYS_INLINE inline
#define ISOGRAD_VERSIONS(result, name, body, parameters, arguments) \
  result name parameters { return body arguments; }
#endif

namespace isograd::kernels {

// Independent partial sums, so that the additions of one vector do not wait for those of the last.
inline constexpr int kLanes = 32;

// Σ of the lanes, in a fixed order.
template <typename T>
ISOGRAD_ALWAYS_INLINE T folded(T* lanes) {
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  return lanes[0];
}

}  // namespace isograd::kernels
