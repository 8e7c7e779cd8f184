// A constant leaf with requires_grad for collectives.
#pragma once

#include <ATen/core/Tensor.h>

namespace isograd::differentiable {

// Collectives depend on this leaf, so that autograd runs their backward on every rank, even where nothing
// needs a gradient. It never gets a gradient itself. All threads share it.
const at::Tensor& anchor();

}  // namespace isograd::differentiable
