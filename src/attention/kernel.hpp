// Attention of one tile by the fastest kernel for it: what both ways through this room stand on.
#pragma once

#include <ATen/core/Tensor.h>

#include "attention/tiles.hpp"

namespace isograd {

// Of the tile alone: out [count · q_length, H, D] in q's type and its log-sums [count · q_length, H] in the
// accumulating type, rows of larger tensors perhaps. q [T, H, D], k and v [N, Hkv, D] on the CPU: heads
// dense, rows any distance apart. No gradient; neither scores nor weights are kept. In fp32 by blocks.hpp
// where products go to brgemm (matmul/product.hpp), else by LibTorch's blocked kernel.
void attend_tile(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Tile& tile,
                 const at::Tensor& out, const at::Tensor& log_sums);

// The tile's part of the gradients of q, k and v, written to their rows in `gradients`, or with `adds` added.
// `attended` has the tile's queries alone, [count · q_length, ...], its log-sums in the accumulating type.
void attend_tile_backward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const AttendedGradient& attended, const Tile& tile,
                          const AttentionGradients& gradients, bool adds);

}  // namespace isograd
