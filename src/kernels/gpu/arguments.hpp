// Arguments that the kernels of kernels.cu take by value. Read by NVRTC, too: no includes.
#ifndef ISOGRAD_GPU_ARGUMENTS
#define ISOGRAD_GPU_ARGUMENTS

namespace isograd::gpu {

// kernels::AdamW in the type that is computed in; `keep` for elements that decay, the others keep all.
struct AdamWScalars {
  float scale, keep, beta2, new1, new2, step, correction, epsilon;
};

// Runs of elements, in order and without gaps, from `begin` on: run i ends before end[i].
struct Runs {
  static constexpr int kMost = 240;
  long long begin;
  long long end[kMost];
  unsigned decays[(kMost + 31) / 32];  // bit i: run i does
  int count;
};

inline constexpr int kAdamWChunk = 4096;  // elements of a block
inline constexpr int kNormPacks = 2;      // of 16 bytes, that a thread holds of a row
inline constexpr int kNormThreads = 512;  // of a row, at most

}  // namespace isograd::gpu

#endif
