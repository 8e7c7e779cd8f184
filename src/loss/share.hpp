// A share: what the one division made of a sum.
#pragma once

#include <ATen/core/Tensor.h>

namespace isograd {

// Whether `value` is a normaliser's share, or a scalar computed from one.
bool is_share(const at::Tensor& value);

// Whether what flows back into a sum, or a mean, is rounded to 16 bits before it meets anything else: then so
// is what the sum is divided by, the same way for every token. Sums and casts are followed.
bool begins_in_16_bits(const at::Tensor& sum);

}  // namespace isograd
