// Autograd for collectives and layers: linear maps of all ranks' tensors, functions that compute their
// gradients one by one, and gradients that are computed in their final memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <functional>
#include <typeindex>
#include <typeinfo>
#include <unordered_set>

namespace isograd {

// Types of every torch::autograd::Function.
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using TensorMap = std::function<at::Tensor(const at::Tensor&)>;

// Returns forward(input); its gradient is backward(gradient). A floating-point result requires a gradient
// wherever gradients are enabled, even if `input` does not, because other ranks may need this rank in a
// backward that communicates. `backward` is differentiable again if it uses such maps.
at::Tensor apply_map(const at::Tensor& input, TensorMap forward, TensorMap backward);

namespace differentiable {

// A constant leaf with requires_grad. Collectives depend on it, so that autograd runs their backward on every
// rank, even where nothing needs a gradient. It never gets a gradient itself. All threads share it.
const at::Tensor& anchor();

// ---- functions that compute their gradients one by one (for parallel/pipeline/split_backward.hpp) ---------

// Written before main() and only read afterwards. Never destroyed: threads may outlive statics.
inline std::unordered_set<std::type_index>& declared_separable() {
  static auto* types = new std::unordered_set<std::type_index>();
  return *types;
}

// Whether separate calls of this node for different inputs cost together as much as one call for all. True
// for LibTorch's own nodes and declared ones. A split backward calls other nodes once, for all inputs.
inline bool is_separable(torch::autograd::Node& node) {
  // LibTorch generates its own nodes and guards each gradient by task_should_compute_output().
  return node.is_traceable() || declared_separable().contains(typeid(node));
}

// Declares functions, as an object at namespace scope. The backward of each computes only the gradients that
// context->needs_input_grad() asks for, and does not communicate.
template <typename... Functions>
struct Separable {
  Separable() { (declared_separable().insert(typeid(torch::autograd::CppNode<Functions>)), ...); }
};

// ---- a parameter's gradient in its final memory ---------------------------------------------------------

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

// For gradients that autograd::grad() returns: while one lives, `take` is asked on this thread in place of a
// hook. The last one made answers.
class PlacesOfReturnedGradients {
 public:
  using Take = std::function<GradientPlace::Taken(const at::Tensor& parameter, at::ScalarType type)>;
  explicit PlacesOfReturnedGradients(Take take);
  ~PlacesOfReturnedGradients();
  PlacesOfReturnedGradients(const PlacesOfReturnedGradients&) = delete;
  PlacesOfReturnedGradients& operator=(const PlacesOfReturnedGradients&) = delete;

 private:
  Take take_;
  const Take* before_;
};

// Asks for the memory of a leaf's gradient during a backward. Returns memory only if no tensor or node hook
// sees the gradient first, it is kept in `type`, and the leaf has such a hook where this backward accumulates
// .grad of all leaves, or, in autograd::grad(), PlacesOfReturnedGradients has a place for it.
GradientPlace::Taken take_gradient_place(const at::Tensor& parameter, at::ScalarType type);

// The value to return to autograd for a gradient that was computed in `memory`: the memory itself where it
// has the parameter's type. For another type autograd would make a rounded copy, so it gets a sparse tensor
// without elements, which it adds to .grad, the memory, without changing it.
at::Tensor gradient_in(const at::Tensor& memory, const at::Tensor& parameter);

}  // namespace differentiable
}  // namespace isograd
