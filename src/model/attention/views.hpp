// Rows of tokens as the attention kernels want them, without a copy.
#pragma once

#include <ATen/core/Tensor.h>

namespace isograd {

// `count` blocks of `length` rows each, one after another from `begin`.
struct Rows {
  std::int64_t begin = 0, count = 1, length = 0;
};

// x [T, heads, ...] -> [count, heads / groups, length, ...]: of the `groups` heads that share a key head, the
// `group`-th.
inline at::Tensor heads_first(const at::Tensor& x, const Rows& rows, std::int64_t groups = 1,
                              std::int64_t group = 0) {
  std::vector<std::int64_t> sizes{rows.count, rows.length, x.size(1) / groups, groups};
  if (x.dim() == 3) sizes.push_back(x.size(2));
  return x.narrow(0, rows.begin, rows.count * rows.length).view(sizes).select(3, group).transpose(1, 2);
}

// Grouped-query attention: how many query heads share a key head. q [T, H, D], k [T, Hkv, D].
inline std::int64_t queries_per_key(const at::Tensor& q, const at::Tensor& k) {
  return q.size(1) / k.size(1);
}

}  // namespace isograd
