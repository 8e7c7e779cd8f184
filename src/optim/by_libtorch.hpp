// The updates of kernels/flat.hpp in LibTorch's operators, for buffers on other devices than the CPU; on the
// CPU too, as their twins.
#pragma once

#include "isograd/parameters.hpp"
#include "kernels/flat.hpp"
#include "optim/runs.hpp"

namespace isograd::by_libtorch {

// Of a run's elements; scalars.keep and scalars.weight_decay are for those that decay. In the type of the
// master; AdamW by LibTorch's fused pass, SGD by the same expressions, each operator rounding once.
void adamw(const kernels::AdamW& scalars, Bucket& bucket, at::Tensor& first, at::Tensor& second,
           const LongRun& run);
// `velocity` is null exactly when momentum is 0.
void sgd(const kernels::Sgd& scalars, Bucket& bucket, at::Tensor* velocity, const LongRun& run);

}  // namespace isograd::by_libtorch
