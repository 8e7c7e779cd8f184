#include "parallel/context/ulysses.hpp"

#include <ATen/ATen.h>

namespace isograd {
namespace {

// x [T_local, heads, D] -> [size, T_local, heads/size, D], each rank's heads; where there are fewer heads
// than ranks, the one head that each rank reads.
at::Tensor by_rank(const at::Tensor& x, int parts) {
  const std::int64_t heads = x.size(1);
  const at::Tensor enough = heads < parts ? x.repeat_interleave(parts / heads, 1) : x;
  return enough.reshape({x.size(0), parts, std::max<std::int64_t>(1, heads / parts), x.size(2)})
      .transpose(0, 1);
}

Group::Rows equal(const Group& group, const Group::Rows& rows) {
  return Group::Rows(rows.size(), rows[static_cast<std::size_t>(group.rank())]);
}

// [size, T_local, h, D] to [T, h, D]
at::Tensor spread(Group& group, const Group::Rows& rows, const at::Tensor& parts) {
  return group.all_to_all(parts.contiguous().flatten(0, 1), rows, equal(group, rows));
}

// [T, h, D] to [size, T_local, h, D]
at::Tensor collect(Group& group, const Group::Rows& rows, const at::Tensor& x) {
  const at::Tensor all = group.all_to_all(x.contiguous(), equal(group, rows), rows);
  return all.view({group.size(), rows[static_cast<std::size_t>(group.rank())], x.size(1), x.size(2)});
}

// [size, T_local, h, D] to [T_local, size · h, D]
at::Tensor side_by_side(const at::Tensor& parts) {
  return parts.transpose(0, 1).reshape({parts.size(1), parts.size(0) * parts.size(2), parts.size(3)});
}

}  // namespace

Heads to_heads(Group& ulysses, const Group::Rows& rows, const Heads& tokens) {
  const int size = ulysses.size();
  const at::Tensor q = by_rank(tokens.q, size), k = by_rank(tokens.k, size), v = by_rank(tokens.v, size);
  const at::Tensor all = spread(ulysses, rows, at::cat({q, k, v}, 2));
  const auto parts = all.split_with_sizes({q.size(2), k.size(2), v.size(2)}, 1);
  return {parts[0].contiguous(), parts[1].contiguous(), parts[2].contiguous()};
}

Heads from_heads(Group& ulysses, const Group::Rows& rows, const Heads& gradients,
                 std::int64_t key_value_heads) {
  const at::Tensor all = collect(ulysses, rows, at::cat({gradients.q, gradients.k, gradients.v}, 1));
  const auto parts = all.split_with_sizes({gradients.q.size(1), gradients.k.size(1), gradients.v.size(1)}, 2);
  const auto of_keys = [&](const at::Tensor& x) {
    const at::Tensor heads = side_by_side(x);
    if (heads.size(1) == key_value_heads) return heads;
    return heads.view({heads.size(0), key_value_heads, heads.size(1) / key_value_heads, heads.size(2)})
        .sum(2);
  };
  return {side_by_side(parts[0]), of_keys(parts[1]), of_keys(parts[2])};
}

at::Tensor to_tokens(Group& ulysses, const Group::Rows& rows, const at::Tensor& out) {
  return side_by_side(collect(ulysses, rows, out));
}

at::Tensor from_tokens(Group& ulysses, const Group::Rows& rows, const at::Tensor& gradient) {
  return spread(ulysses, rows, by_rank(gradient, ulysses.size()));
}

}  // namespace isograd
