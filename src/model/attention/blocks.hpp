// Attention in fp32 by blocks of queries and keys, whose products LibTorch's brgemm computes.
#pragma once

#include <ATen/core/Tensor.h>

#include "model/attention/tiles.hpp"

namespace isograd::blocks {

// attend_tile() and attend_tile_backward() (kernel.hpp) in fp32.
void attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Tile& tile,
            const at::Tensor& out, const at::Tensor& log_sums);
void attend_backward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const AttendedGradient& attended, const Tile& tile, const AttentionGradients& gradients,
                     bool adds);

}  // namespace isograd::blocks
