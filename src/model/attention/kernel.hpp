// Attention of one tile by the fastest kernel for it: what both ways through this room stand on.
#pragma once

#include <ATen/core/Tensor.h>

#include "model/attention/tiles.hpp"

namespace isograd {

// Whether the two below compute tiles of these: on the CPU all; on a GPU bf16 and fp16, where LibTorch's
// flash attention takes them. They do in backward what they did in forward. Elsewhere: products.hpp.
bool has_tile_kernel(const at::Tensor& q, const at::Tensor& k, bool causal);

// Of the tile alone: out [count · q_length, H, D] in q's type and its log-sums [count · q_length, H] in the
// accumulating type, rows of larger tensors perhaps. q [T, H, D], k and v [N, Hkv, D]: heads
// dense, rows any distance apart. No gradient; neither scores nor weights are kept. On the CPU in fp32 by
// blocks.hpp where products go to brgemm (matmul/product.hpp), else by LibTorch's blocked kernel.
void attend_tile(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Tile& tile,
                 const at::Tensor& out, const at::Tensor& log_sums);

// The tile's part of the gradients of q, k and v, written to their rows in `gradients`, or with `adds` added.
// `attended` has the tile's queries alone, [count · q_length, ...], its log-sums in the accumulating type.
void attend_tile_backward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const AttendedGradient& attended, const Tile& tile,
                          const AttentionGradients& gradients, bool adds);

// All fragments of a batch in one call of LibTorch's flash attention for GPUs (bf16 and fp16), told to add in
// one order, so that a step made twice has the same bits.
namespace fragments {

bool has_kernel(const at::Tensor& q, const at::Tensor& k, bool causal);

struct Attended {
  at::Tensor out{};                         // [T, H, D]
  at::Tensor log_sums{}, seed{}, offset{};  // for backward, in the kernel's own form
};
// cu_seqlens [F + 1] int32 on the device of q; `longest`: no fragment is longer.
Attended attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& cu_seqlens,
                std::int64_t longest, bool causal);
AttentionGradients attend_backward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const at::Tensor& gradient, const Attended& attended,
                                   const at::Tensor& cu_seqlens, std::int64_t longest, bool causal);

}  // namespace fragments
}  // namespace isograd
