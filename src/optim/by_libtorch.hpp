// The updates of kernels/flat.hpp in LibTorch's operators, for buffers on other devices than the CPU; on the
// CPU too, as their twins.
#pragma once

#include "isograd/parameters.hpp"
#include "kernels/flat.hpp"
#include "optim/optimizers.hpp"

namespace isograd::by_libtorch {

// Numbers that only a device knows: one in fp64 by which gradients are multiplied, as by the scalars' own,
// and one in fp32 that stops the update unless it is 0. Both are undefined where the scalars decide.
struct OnDevice {
  at::Tensor scale{}, stop{};
};

// Updates a run's elements; scalars.keep and scalars.weight_decay apply to those that decay. Computed in
// the type of the master. AdamW uses LibTorch's fused pass; SGD uses the same expressions as operators,
// each rounding once.
void adamw(const kernels::AdamW& scalars, Bucket& bucket, at::Tensor& first, at::Tensor& second,
           const LongRun& run, const OnDevice& on_device = {});
// `velocity` is null exactly when momentum is 0.
void sgd(const kernels::Sgd& scalars, Bucket& bucket, at::Tensor* velocity, const LongRun& run);

}  // namespace isograd::by_libtorch
