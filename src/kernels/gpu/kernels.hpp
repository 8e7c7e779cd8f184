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

// For model/fused.hpp. Tensors of one type, contiguous; of `x` [T, heads, dim] the heads are, its rows may
// lie apart. cos and sin [T, dim/2] fp32, contiguous. `direction` 1 or −1.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);
// Gradients of gate and up.
std::pair<at::Tensor, at::Tensor> swiglu_backward(const at::Tensor& dy, const at::Tensor& gate,
                                                  const at::Tensor& up);
at::Tensor rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, int direction);

// Whether rows of this width can be normalized by the two below.
bool has_norm(const at::Tensor& like, std::int64_t width);
// y and the rows' scales [rows] fp32, of x [..., width].
std::pair<at::Tensor, at::Tensor> rms_norm(const at::Tensor& x, const at::Tensor& weight, double epsilon);
// Gradients of x, to which `residual` is added unless it is undefined, and of the weight, undefined unless
// `of_weight`.
std::pair<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& dy, const at::Tensor& x,
                                                    const at::Tensor& weight, const at::Tensor& scales,
                                                    const at::Tensor& residual, bool of_weight);

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
// Threads of a block of rotary().
unsigned rotary_threads(std::int64_t heads, std::int64_t half);
// Threads of a block of rms_norm(), and rows of one of its backward.
unsigned norm_threads(std::int64_t packs);
std::int64_t norm_rows(std::int64_t rows);

}  // namespace isograd::gpu
