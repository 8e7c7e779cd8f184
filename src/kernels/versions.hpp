// One function, several instruction sets: the best one that this processor has is chosen at the first call.
// All versions give the same bits: no reassociation, no contraction (see CMakeLists.txt).
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#define ISOGRAD_ALWAYS_INLINE inline __attribute__((always_inline))
#define ISOGRAD_AVX512 \
  __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512cd,prefer-vector-width=512")))
#define ISOGRAD_AVX2 __attribute__((target("avx2,fma")))

namespace isograd::kernels {

// 2: AVX-512, 1: AVX2 with FMA, 0: what every x86-64 has. A test lowers it to reach the other versions;
// nothing else writes it.
inline int& processor_level() {
  static int level = [] {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("fma") && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd"))
      return 2;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? 1 : 0;
  }();
  return level;
}

}  // namespace isograd::kernels

// Defines `result name parameters`, which returns `call` (of ISOGRAD_ALWAYS_INLINE functions) compiled for
// the processor at hand; `arguments` repeats the names of the parameters. No ifunc: its resolvers run before
// the sanitizers are ready.
#define ISOGRAD_VERSIONS(result, name, parameters, arguments, call) \
  ISOGRAD_AVX512 static result name##_on_avx512 parameters {        \
    return call;                                                    \
  }                                                                 \
  ISOGRAD_AVX2 static result name##_on_avx2 parameters {            \
    return call;                                                    \
  }                                                                 \
  static result name##_on_any parameters {                          \
    return call;                                                    \
  }                                                                 \
  result name parameters {                                          \
    const int level = processor_level();                            \
    return level == 2   ? name##_on_avx512 arguments                \
           : level == 1 ? name##_on_avx2 arguments                  \
                        : name##_on_any arguments;                  \
  }
#else
#define ISOGRAD_ALWAYS_INLINE inline
#define ISOGRAD_VERSIONS(result, name, parameters, arguments, call) \
  result name parameters {                                          \
    return call;                                                    \
  }
#endif
