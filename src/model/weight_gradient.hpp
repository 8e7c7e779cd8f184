// The gradient of a linear layer's weight.
#pragma once

#include <ATen/core/Tensor.h>

namespace isograd {

// In mid-backward: dyᵀ x, [n, k], for a weight of that shape; dy [m, n], x [m, k]. In fp32 and fp64
// where the parameter's gradient is kept if it can be had (comm/gradient_place.hpp). To be returned as the
// weight's gradient.
at::Tensor weight_gradient(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight);

}  // namespace isograd
