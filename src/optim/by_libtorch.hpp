// The updates of kernels/flat.hpp in LibTorch's operators, for buffers on other devices than the CPU; on the
// CPU too, as their twins.
#pragma once

#include "isograd/parameters.hpp"
#include "kernels/flat.hpp"

namespace isograd::by_libtorch {

// Of the bucket's held elements `range`. The same expressions in the type of the master, each operator
// rounding once.
void adamw(const kernels::AdamW& scalars, Bucket& bucket, at::Tensor& first, at::Tensor& second, Range range);
// `velocity` is null exactly when momentum is 0.
void sgd(const kernels::Sgd& scalars, Bucket& bucket, at::Tensor* velocity, Range range);

}  // namespace isograd::by_libtorch
