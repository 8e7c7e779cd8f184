// CUDA's words for a C++ compiler, so that kernels.cu is compiled for the CPU by the tests: blocks and
// threads are loops (no kernel of it waits for another thread).
#pragma once

#include <bit>
#include <cmath>

#include "kernels/gpu/arguments.hpp"

namespace isograd::gpu {

struct Three {
  unsigned x = 0;
};
inline thread_local Three blockIdx, threadIdx, blockDim, gridDim;

inline float __uint_as_float(unsigned bits) {
  return std::bit_cast<float>(bits);
}
inline unsigned __float_as_uint(float x) {
  return std::bit_cast<unsigned>(x);
}

template <typename Kernel, typename... Arguments>
void run_on_host(Kernel kernel, unsigned blocks, unsigned threads, const Arguments&... arguments) {
  gridDim.x = blocks;
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) kernel(arguments...);
}

}  // namespace isograd::gpu

#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(threads)
