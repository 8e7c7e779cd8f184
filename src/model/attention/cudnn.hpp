// cuDNN's attention of one document that fills the batch, in bf16 or fp16 on GPUs from compute capability 9.0
// on, where it takes about half of the time of LibTorch's flash attention.
#pragma once

#include <ATen/core/Tensor.h>

#include "model/attention/kernel.hpp"

namespace isograd::cudnn {

// Backward keeps dS of at most this many bytes at a time, for as many heads as fit.
inline constexpr std::int64_t kMostKept = std::int64_t{1} << 30;

// Key heads whose query heads are computed at a time in backward: a divisor of `key_heads`; 0: one alone
// would keep too much.
std::int64_t key_heads_at_a_time(std::int64_t tokens, std::int64_t heads, std::int64_t key_heads);

// Whether the two below compute this. q [T, H, D], k and v [T, Hkv, D], heads dense, rows any distance apart.
// The first call for some sizes makes cuDNN's plans, a fraction of a second, and where that fails says so
// once. While a CUDA graph is recorded nothing is made. Plans stay: the answer for a size does not change
// back.
bool serves(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal);

fragments::Attended attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal);
// Adds in one order: cuDNN is told to, for otherwise it adds the parts of a query's gradient as they come.
AttentionGradients attend_backward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const at::Tensor& gradient, const fragments::Attended& attended,
                                   bool causal);

}  // namespace isograd::cudnn
