// Attention inside fragments, on one device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "isograd/batch.hpp"

namespace isograd {

// softmax(q kᵀ / √D) v within each fragment [cu_seqlens[f], cu_seqlens[f+1]); with `causal` a position sees
// itself and earlier ones. Grouped-query: query head h reads key and value head h / (H / Hkv).
// q [T, H, D], k and v [T, Hkv, D], the last dim dense, fp64, fp32 or bf16; returns [T, H, D]. Differentiable
// once. What a fragment gives and gets (output, gradients) does not depend on other fragments' values, to the
// last bit. ConfigError on shapes, dtypes or cu_seqlens that do not fit.
at::Tensor variable_length_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                     const std::vector<std::int64_t>& cu_seqlens, bool causal = true);
// Within the batch's fragments. A GPU's flash attention reads cu_seqlens where q is
// (Batch::cu_seqlens_on_device), and of those on the CPU only how long a fragment may be. Where these are
// bounds alone (Batch::bounds_only) and no such kernel takes q, all tokens are scored under a mask;
// ConfigError if there are more than 4,096 of them.
at::Tensor variable_length_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                     const Batch& batch, bool causal = true);

// The last L of N positions attend to all before them and themselves; no gradient. For generation with cached
// keys and values. q [L, H, D], keys and values [N, Hkv, D], L <= N; returns [L, H, D].
at::Tensor cached_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values);

// The obviously right twin: one T×T mask, an explicit softmax.
at::Tensor naive_variable_length_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                           const std::vector<std::int64_t>& cu_seqlens, bool causal = true);

}  // namespace isograd
