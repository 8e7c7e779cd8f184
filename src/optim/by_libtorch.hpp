// The updates of kernels/flat.hpp in LibTorch's operators, for buffers on other devices than the CPU; on the
// CPU too, as their twins.
#pragma once

#include "isograd/parameters.hpp"
#include "kernels/flat.hpp"
#include "optim/runs.hpp"

namespace isograd::by_libtorch {

// Updates a run's elements; scalars.keep and scalars.weight_decay apply to those that decay. Computed in
// the type of the master. AdamW uses LibTorch's fused pass; SGD uses the same expressions as operators,
// each rounding once.
void adamw(const kernels::AdamW& scalars, Bucket& bucket, at::Tensor& first, at::Tensor& second,
           const LongRun& run);
// `velocity` is null exactly when momentum is 0.
void sgd(const kernels::Sgd& scalars, Bucket& bucket, at::Tensor* velocity, const LongRun& run);

}  // namespace isograd::by_libtorch
