// Kernels in CUDA C++ for what LibTorch has no single kernel for. Each is one pass over memory. They go to
// the current stream, and may be recorded in a CUDA graph.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "kernels/gpu/arguments.hpp"

namespace isograd::gpu {

// Whether the functions below take tensors as `like` is: fp32 or bf16, on a GPU of compute capability 8.0 or
// newer, with NVRTC. The first call for a device compiles all kernels, about a second; where that fails it
// says so once. While a graph is recorded nothing is compiled.
bool has_kernels(const at::Tensor& like);

// Of model/fused.hpp. Tensors of one type, contiguous; of `x` [T, heads, dim] the heads are, its rows may lie
// apart. cos and sin [T, dim/2] fp32, contiguous. `direction` 1 or −1.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);
// Gradients of gate and up.
std::pair<at::Tensor, at::Tensor> swiglu_backward(const at::Tensor& dy, const at::Tensor& gate,
                                                  const at::Tensor& up);
at::Tensor rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, int direction);

// Runs that follow one another from `begin` on.
struct RunEnd {
  std::int64_t end;
  bool decays;
};
// kernels::AdamW of fp32 `master` and moments, from gradients in fp32 or bf16; flat, one length. `rounded` is
// undefined or gets the bf16 roundings. `scale`, one fp64 number there, takes the place of the scalars';
// nothing moves unless `stop`, one number in fp32 there, is 0. Both may be undefined.
void adamw(const AdamWScalars& scalars, std::int64_t begin, const std::vector<RunEnd>& ends,
           const at::Tensor& gradients, const at::Tensor& master, const at::Tensor& first,
           const at::Tensor& second, const at::Tensor& rounded, const at::Tensor& scale = {},
           const at::Tensor& stop = {});

// The launches of adamw(): of at most Runs::kMost runs each.
std::vector<Runs> tables_of(std::int64_t begin, const std::vector<RunEnd>& ends);
unsigned adamw_blocks(const Runs& runs);
// Blocks and threads of rotary().
unsigned rotary_threads(std::int64_t heads, std::int64_t half);

}  // namespace isograd::gpu
