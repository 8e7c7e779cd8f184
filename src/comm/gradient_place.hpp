// Lets functions compute a parameter's gradient in its final memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>

namespace isograd::differentiable {

// The post-accumulate hook of a parameter whose gradient has its own memory.
class GradientPlace : public torch::autograd::PostAccumulateGradHook {
 public:
  struct Taken {
    at::Tensor memory{};  // the parameter's shape, the requested type; undefined: no buffer available
    bool adds = false;    // the memory holds the sum of earlier gradients; add to it
  };
  // A backward that takes the memory returns gradient_in(memory, parameter). Autograd then keeps the memory
  // as it is instead of adding the result to it. The memory is given once in a backward: a second use of the
  // parameter gets none, and autograd adds the two gradients.
  virtual Taken take(const at::Tensor& parameter, at::ScalarType type) = 0;
};

// Asks `parameter` for its gradient's memory during a backward. Returns memory only if the parameter is a
// leaf with such a hook, this backward accumulates .grad of all leaves (autograd::grad() does not), no tensor
// or node hook sees the gradient first, and the gradient is kept in `type`.
GradientPlace::Taken take_gradient_place(const at::Tensor& parameter, at::ScalarType type);

// The value to return to autograd for a gradient that was computed in `memory`: the memory itself where it
// has the parameter's type. For another type autograd would make a rounded copy, so it gets a sparse tensor
// without elements, which it adds to .grad, the memory, without changing it.
at::Tensor gradient_in(const at::Tensor& memory, const at::Tensor& parameter);

}  // namespace isograd::differentiable
