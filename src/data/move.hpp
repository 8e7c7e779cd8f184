// From the CPU to where a model computes.
#pragma once

#include <ATen/core/Tensor.h>

namespace isograd {

// The tensor on `device`: itself where it lies there. From the CPU to a GPU by way of pinned memory, beside
// what the device computes; the host does not wait.
at::Tensor moved(const at::Tensor& tensor, at::Device device);

}  // namespace isograd
