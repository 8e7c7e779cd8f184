// A loss made of its classes' values, which depends on the scores by a gradient known already.
#pragma once

#include <ATen/core/Tensor.h>

#include "isograd/ranking.hpp"

namespace isograd {

struct ClassValues {
  at::Tensor values;  // [C] on the CPU; 0 where invalid, but under kNone what is to be returned
  at::Tensor valid;   // [C] bool on the CPU: an invalid class takes no gradient from above
  LossReduction reduction;
};

// A scalar, or [C] under kNone, detached.
at::Tensor reduced(const ClassValues& of);
// The same on the scores' device, differentiable: gradient [N, C] of each class's value by the scores [N, C].
at::Tensor reduced(const ClassValues& of, const at::Tensor& scores, const at::Tensor& gradient);

}  // namespace isograd
