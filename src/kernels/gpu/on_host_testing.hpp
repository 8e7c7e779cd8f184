// CUDA's words for a C++ compiler, so that kernels.cu is compiled for the CPU by the tests: blocks and
// threads are loops, or threads of the CPU where a kernel's threads wait for one another.
#pragma once

#include <array>
#include <barrier>
#include <bit>
#include <cmath>
#include <thread>
#include <vector>

#include "kernels/gpu/arguments.hpp"

namespace isograd::gpu {

struct Three {
  unsigned x = 0;
};
inline thread_local Three blockIdx, threadIdx, blockDim, gridDim;

inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }

template <typename Kernel, typename... Arguments>
void run_on_host(Kernel kernel, unsigned blocks, unsigned threads, const Arguments&... arguments) {
  gridDim.x = blocks;
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) kernel(arguments...);
}

// The block that runs, one at a time.
struct Block {
  std::barrier<> all;
  std::array<float, kNormThreads> passed{};
};
inline Block* block = nullptr;

inline void __syncthreads() { block->all.arrive_and_wait(); }
inline float __shfl_xor_sync(unsigned, float x, int distance) {
  block->passed[threadIdx.x] = x;
  __syncthreads();
  const float other = block->passed[threadIdx.x ^ static_cast<unsigned>(distance)];
  __syncthreads();
  return other;
}

template <typename Kernel, typename... Arguments>
void run_together_on_host(Kernel kernel, unsigned blocks, unsigned threads, const Arguments&... arguments) {
  Block own{.all = std::barrier<>(static_cast<std::ptrdiff_t>(threads))};
  block = &own;
  std::vector<std::thread> running;
  for (unsigned thread = 0; thread < threads; ++thread)
    running.emplace_back([&, thread] {
      gridDim.x = blocks;
      blockDim.x = threads;
      threadIdx.x = thread;
      for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        kernel(arguments...);
        __syncthreads();  // the next block has the same memory
      }
    });
  for (std::thread& each : running) each.join();
}

}  // namespace isograd::gpu

#define __device__
#define __global__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)
