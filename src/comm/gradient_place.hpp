// Where a parameter's gradient is kept, for functions that can compute it there.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>

namespace isograd::differentiable {

// The post-accumulate hook of a parameter whose gradient has memory of its own.
class GradientPlace : public torch::autograd::PostAccumulateGradHook {
 public:
  struct Taken {
    at::Tensor memory{};  // of the parameter's shape and the type asked for; undefined: not to be had
    bool adds = false;    // it has the sum of earlier gradients, to which this one is to be added
  };
  // Whoever is given the memory returns gradient_in(memory, parameter) from its backward: autograd then keeps
  // the memory as it is, where it would have added what is returned to what is there. Once in a backward: a
  // second use of the parameter in it is refused the memory, and autograd adds the two up.
  virtual Taken take(const at::Tensor& parameter, at::ScalarType type) = 0;
};

// In mid-backward: of `parameter`, if it is a leaf with such a hook, if this backward adds up .grad of all
// leaves (and not: gives gradients to a caller of autograd::grad()), and if nobody else looks at its gradient
// on the way (hooks of the tensor, or of its node). Nothing where the gradient is kept in another type than
// `type`.
GradientPlace::Taken take_gradient_place(const at::Tensor& parameter, at::ScalarType type);

// Returned to autograd for a gradient that was computed in `memory`: the memory itself where it has the
// parameter's type. Of another type autograd would make a rounded copy: there it gets a sparse tensor without
// elements, which it adds to .grad, the memory, without touching anything.
at::Tensor gradient_in(const at::Tensor& memory, const at::Tensor& parameter);

}  // namespace isograd::differentiable
