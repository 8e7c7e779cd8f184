// The autograd functions that compute their gradients one by one, for split backwards
// (parallel/pipeline/split_backward.hpp).
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <typeinfo>

namespace isograd::differentiable {

void declare_separable(const std::type_info& node);

// Whether separate calls of this node for different inputs cost together as much as one call for all. True
// for LibTorch's own nodes and declared ones. A split backward calls other nodes once, for all inputs.
bool is_separable(torch::autograd::Node& node);

// Declares functions, as an object at namespace scope. The backward of each computes only the gradients that
// context->needs_input_grad() asks for, and does not communicate.
template <typename... Functions>
struct Separable {
  Separable() { (declare_separable(typeid(torch::autograd::CppNode<Functions>)), ...); }
};

}  // namespace isograd::differentiable
