// Differentiable collectives: a linear map of all ranks' tensors, and the map of its gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace isograd {

using TensorMap = std::function<at::Tensor(const at::Tensor&)>;

// Returns forward(input); its gradient is backward(gradient). A floating-point result requires a gradient
// wherever gradients are enabled, even if `input` does not, because other ranks may need this rank in a
// backward that communicates. `backward` is differentiable again if it uses such maps.
at::Tensor apply_map(const at::Tensor& input, TensorMap forward, TensorMap backward);

namespace differentiable {

// A constant leaf with requires_grad. Collectives depend on it, so that autograd runs their backward on every
// rank, even where nothing needs a gradient. It never gets a gradient itself. All threads share it.
const at::Tensor& anchor();

}  // namespace differentiable
}  // namespace isograd
