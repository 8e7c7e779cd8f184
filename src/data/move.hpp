// Copies tensors to the model's device.
#pragma once

#include <ATen/core/Tensor.h>

namespace isograd {

// The tensor on `device`; the tensor itself if it is there. A copy from the CPU to a GPU goes through pinned
// memory and overlaps with the device's work; the host does not wait.
at::Tensor moved(const at::Tensor& tensor, at::Device device);

}  // namespace isograd
