// Where a parameter's gradient is kept, for functions that can compute it there.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>

namespace isograd::differentiable {

// The post-accumulate hook of a parameter whose gradient has memory of its own.
class GradientPlace : public torch::autograd::PostAccumulateGradHook {
 public:
  struct Taken {
    at::Tensor memory{};  // of the parameter's shape and type; undefined: not to be had
    bool adds = false;    // it has the sum of earlier gradients, to which this one is to be added
  };
  // Whoever is given the memory returns it from its backward as the parameter's gradient: autograd then keeps
  // it as it is, where it would have added what is returned to what is there. Once in a backward: a second
  // use of the parameter in it is refused the memory, and autograd adds the two up.
  virtual Taken take(const at::Tensor& parameter) = 0;
};

// In mid-backward: of `parameter`, if it is a leaf with such a hook, if this backward adds up .grad of all
// leaves (and not: gives gradients to a caller of autograd::grad()), and if nobody else looks at its gradient
// on the way (hooks of the tensor, or of its node).
GradientPlace::Taken take_gradient_place(const at::Tensor& parameter);

}  // namespace isograd::differentiable
