// A leaf that keeps other ranks company in backward.
#pragma once

#include <ATen/core/Tensor.h>

namespace isograd::differentiable {

// What takes part in other ranks' backward leads to it, so that a backward comes by even if nothing else here
// needs a gradient. Never gets one itself. The same for all threads.
const at::Tensor& anchor();

}  // namespace isograd::differentiable
