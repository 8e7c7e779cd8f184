// Copies tensors to the model's device.
#pragma once

#include <ATen/core/Tensor.h>

namespace isograd {

// Goes through pinned memory to a GPU, so that the host does not wait; the tensor itself if it is there.
at::Tensor moved(const at::Tensor& tensor, at::Device device);

}  // namespace isograd
