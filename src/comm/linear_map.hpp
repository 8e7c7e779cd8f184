// A linear map of all ranks' tensors together and the map that its gradients take, for autograd to carry.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace isograd {

using TensorMap = std::function<at::Tensor(const at::Tensor&)>;

// forward(input), whose gradient is backward(gradient). A result of a floating type requires a gradient
// wherever gradients are enabled, whether `input` does or not: other ranks may need this one in a backward
// that communicates. `backward` may be differentiated again if it is made of such maps.
at::Tensor apply_map(const at::Tensor& input, TensorMap forward, TensorMap backward);

}  // namespace isograd
