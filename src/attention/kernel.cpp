#include "attention/kernel.hpp"

#include <ATen/ATen.h>

#include "attention/blocks.hpp"
#include "attention/views.hpp"
#include "matmul/product.hpp"

namespace isograd {
namespace {

bool goes_by_blocks(const at::Tensor& q) {
  return q.scalar_type() == at::kFloat && products_by_brgemm();
}

// LibTorch's kernel takes as many query heads as key heads: one group of those that share a key head at a
// time, on views.
struct Groups {
  const Tile& tile;
  std::int64_t count;
  Rows queries{tile.q_row, tile.count, tile.q_length}, keys{tile.k_row, tile.count, tile.k_length};

  at::Tensor of(const at::Tensor& x, std::int64_t group) const {
    return heads_first(x, queries, count, group);
  }
  // Of what holds the tile's queries alone.
  at::Tensor of_part(const at::Tensor& x, std::int64_t group) const {
    return heads_first(x, {0, tile.count, tile.q_length}, count, group);
  }
  at::Tensor of_keys(const at::Tensor& x) const { return heads_first(x, keys); }
};

void put(const at::Tensor& from, at::Tensor to, bool adds) {
  adds ? to.add_(from) : to.copy_(from);
}

}  // namespace

void attend_tile(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Tile& tile,
                 const at::Tensor& out, const at::Tensor& log_sums) {
  if (goes_by_blocks(q)) return blocks::attend(q, k, v, tile, out, log_sums);
  const Groups groups{tile, queries_per_key(q, k)};
  for (std::int64_t group = 0; group < groups.count; ++group) {
    const auto [part, sums] = at::_scaled_dot_product_flash_attention_for_cpu(
        groups.of(q, group), groups.of_keys(k), groups.of_keys(v), 0.0, tile.causal);
    put(part, groups.of_part(out, group), false);
    put(sums, groups.of_part(log_sums, group), false);
  }
}

void attend_tile_backward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const AttendedGradient& attended, const Tile& tile,
                          const AttentionGradients& gradients, bool adds) {
  if (goes_by_blocks(q)) return blocks::attend_backward(q, k, v, attended, tile, gradients, adds);
  const Groups groups{tile, queries_per_key(q, k)};
  for (std::int64_t group = 0; group < groups.count; ++group) {
    const auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        groups.of_part(attended.gradient, group), groups.of(q, group), groups.of_keys(k), groups.of_keys(v),
        groups.of_part(attended.out, group), groups.of_part(attended.log_sums, group), 0.0, tile.causal);
    put(dq, groups.of(gradients.q, group), adds);
    // Over the query heads that share a key head, in order.
    put(dk, groups.of_keys(gradients.k), adds || group > 0);
    put(dv, groups.of_keys(gradients.v), adds || group > 0);
  }
}

}  // namespace isograd
