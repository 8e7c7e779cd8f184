// The ways to compute attention: one tile by the CPU's fastest kernel, whole fragments on a GPU, matrix
// products.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "model/attention/tiles.hpp"

namespace isograd {

// `count` blocks of `length` rows each, one after another from `begin`.
struct Rows {
  std::int64_t begin = 0, count = 1, length = 0;
};

// x [T, heads, ...] -> [count, heads / groups, length, ...], a view: of the `groups` heads that share a key
// head, the `group`-th.
inline at::Tensor heads_first(const at::Tensor& x, const Rows& rows, std::int64_t groups = 1,
                              std::int64_t group = 0) {
  std::vector<std::int64_t> sizes{rows.count, rows.length, x.size(1) / groups, groups};
  if (x.dim() == 3) sizes.push_back(x.size(2));
  return x.narrow(0, rows.begin, rows.count * rows.length).view(sizes).select(3, group).transpose(1, 2);
}

// The same heads with nothing between them; rows may lie apart.
inline at::Tensor dense_heads(const at::Tensor& x) {
  return x.stride(2) == 1 && x.stride(1) == x.size(2) ? x : x.contiguous();
}

// ConfigError unless q [T, H, D], k and v [T, Hkv, D] fit together; `tokens`: T, `of`: what says so.
void check_qkv(const char* where, const Qkv& qkv, std::int64_t tokens, const std::string& of,
               const char* action);

// Grouped-query attention: how many query heads share a key head. q [T, H, D], k [T, Hkv, D].
inline std::int64_t queries_per_key(const at::Tensor& q, const at::Tensor& k) {
  return q.size(1) / k.size(1);
}

// On the CPU, one tile: out [count · q_length, H, D] in q's type and its log-sums [count · q_length, H] in
// the accumulating type, which may be rows of larger tensors. No gradient; neither scores nor weights are
// kept. In fp32 by blocks where products go to brgemm, else by LibTorch's blocked kernel.
void attend_tile(const Qkv& of, const Tile& tile, const at::Tensor& out, const at::Tensor& log_sums);
// The tile's part of the gradients, written to their rows in `gradients`, or with `adds` added. `attended`
// has the tile's queries alone, its log-sums in the accumulating type.
void attend_tile_backward(const Qkv& of, const AttendedGradient& attended, const Tile& tile,
                          const Qkv& gradients, bool adds);

// The two above in fp32, by blocks of queries and keys, whose products LibTorch's brgemm computes.
namespace blocks {
void attend(const Qkv& of, const Tile& tile, const at::Tensor& out, const at::Tensor& log_sums);
void attend_backward(const Qkv& of, const AttendedGradient& attended, const Tile& tile, const Qkv& gradients,
                     bool adds);
}  // namespace blocks

// All fragments of a batch in one call of LibTorch's flash attention for GPUs (bf16 and fp16), told to add in
// one order, so that a repeated step has the same bits.
namespace fragments {
// Whether q and k are bf16 or fp16 on a GPU, in sizes that the kernel takes.
bool has_kernel(const at::Tensor& q, const at::Tensor& k, bool causal);

struct Attended {
  at::Tensor out{};                         // [T, H, D]
  at::Tensor log_sums{}, seed{}, offset{};  // for backward, in the kernel's own form
};
// cu_seqlens [F + 1] int32 on the device of q; `longest`: no fragment is longer.
Attended attend(const Qkv& of, const at::Tensor& cu_seqlens, std::int64_t longest, bool causal);
Qkv attend_backward(const Qkv& of, const at::Tensor& gradient, const Attended& attended,
                    const at::Tensor& cu_seqlens, std::int64_t longest, bool causal);
}  // namespace fragments

// cuDNN's attention of one document that fills the batch, in bf16 or fp16 on GPUs from compute capability 9.0
// on, where it takes about half of the time of LibTorch's flash attention.
namespace cudnn {
// Backward keeps dS of at most this many bytes at a time, for as many heads as fit.
inline constexpr std::int64_t kMostKept = std::int64_t{1} << 30;
// Key heads whose query heads are computed at a time in backward: a divisor of `key_heads`; 0: one alone
// would keep too much.
std::int64_t key_heads_at_a_time(std::int64_t tokens, std::int64_t heads, std::int64_t key_heads);

// Whether the two below compute this. The first call for some sizes makes cuDNN's plans, a fraction of a
// second, and warns once where that fails. Nothing is made while a CUDA graph is recorded. Plans stay, so
// that the answer for a size does not change back.
bool serves(const Qkv& of, bool causal);
fragments::Attended attend(const Qkv& of, bool causal);
// cuDNN is told to add in one order.
Qkv attend_backward(const Qkv& of, const at::Tensor& gradient, const fragments::Attended& attended,
                    bool causal);
}  // namespace cudnn

// By matrix products, on any device and in any type: where there is no kernel, and as the kernels' reference.
namespace products {
// Scores that are kept at a time: as many queries are taken at once, but at least 256. 64 MB in fp32; on a
// GPU fewer leave it waiting for kernels to start (on an H200 4 heads over 2,048 tokens took twice as long in
// slices of 256), more score what a causal mask hides.
inline constexpr std::int64_t kScores = 1 << 24;

// Whole fragments: each tile holds all keys that its queries see. No gradient. `hidden` [T, T], for one tile
// of all tokens: added to its scores, −∞ where a query must not see a key.
void attend_fragments(const Qkv& of, const std::vector<Tile>& tiles, at::Tensor& out,
                      std::int64_t scores = kScores, const at::Tensor& hidden = {});
// Written to the tiles' rows of `gradients`, always in the same order. The weights are computed again.
void attend_fragments_backward(const Qkv& of, const at::Tensor& gradient, const std::vector<Tile>& tiles,
                               const Qkv& gradients, std::int64_t scores = kScores,
                               const at::Tensor& hidden = {});
// Parts of documents, as in tiles.hpp.
void attend(const Qkv& of, const Tile& tile, Attended& attended);
void attend_backward(const Qkv& of, const AttendedGradient& attended, const Tile& tile, const Qkv& gradients);
}  // namespace products

}  // namespace isograd
