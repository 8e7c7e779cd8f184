// A share: what the one division made of a sum.
#pragma once

#include <ATen/core/Tensor.h>

namespace isograd {

// Whether `value` is a normaliser's share, or a scalar computed from one.
bool is_share(const at::Tensor& value);

}  // namespace isograd
