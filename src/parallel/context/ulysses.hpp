// Ulysses: an all-to-all turns this rank's tokens of all heads into all tokens of this rank's heads, and
// back.
#pragma once

#include <ATen/core/Tensor.h>

#include "isograd/group.hpp"

namespace isograd {

struct Heads {
  at::Tensor q, k, v;  // [T, H, D], [T, Hkv, D]
};

// `rows[i]`: tokens of rank i of the group, T_local here, T together. H divides by the group's size; key
// heads divide by it or it by them: then a key head goes to each of the size / Hkv ranks whose queries read
// it. Collective like all here.

// [T_local, H, D] and [T_local, Hkv, D] -> [T, H/size, D] and [T, max(1, Hkv/size), D]
Heads to_heads(Group& ulysses, const Group::Rows& rows, const Heads& tokens);
// Its adjoint, for gradients: copies of a key head are summed, in the order of the ranks.
Heads from_heads(Group& ulysses, const Group::Rows& rows, const Heads& gradients,
                 std::int64_t key_value_heads);

// Attention's output [T, H/size, D] -> [T_local, H, D], and its gradient the other way.
at::Tensor to_tokens(Group& ulysses, const Group::Rows& rows, const at::Tensor& out);
at::Tensor from_tokens(Group& ulysses, const Group::Rows& rows, const at::Tensor& gradient);

}  // namespace isograd
