// Attention by matrix products, on any device and in any type: what computes where there is no kernel for it,
// and what the kernels are tested against.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "model/attention/tiles.hpp"

namespace isograd::products {

// Scores that are kept at a time: as many queries are taken at once, but at least 256. 64 MB in fp32; on a
// GPU fewer leave it waiting for the next kernel to be started (on an H200 4 heads over 2,048 tokens took
// twice as long in slices of 256), more score what a causal mask hides.
inline constexpr std::int64_t kScores = 1 << 24;

// Whole fragments: each tile holds all keys that its queries see. q [T, H, D], k and v [T, Hkv, D], heads
// dense; `out` is written. Each score once, in the accumulating type; no gradient. `hidden` [T, T], of one
// tile of all tokens: what is added to its scores, −∞ where a query must not see a key.
void attend_fragments(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                      const std::vector<Tile>& tiles, at::Tensor& out, std::int64_t scores = kScores,
                      const at::Tensor& hidden = {});

// Given the gradient of `out`. Nothing but q, k and v need be kept: the weights are computed again. Written
// to the tiles' rows of `gradients`, always in the same order.
void attend_fragments_backward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const at::Tensor& gradient, const std::vector<Tile>& tiles,
                               const AttentionGradients& gradients, std::int64_t scores = kScores,
                               const at::Tensor& hidden = {});

// Parts of documents, as in tiles.hpp.
void attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Tile& tile,
            Attended& attended);
void attend_backward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const AttendedGradient& attended, const Tile& tile, AttentionGradients& gradients);

}  // namespace isograd::products
