// Which autograd functions compute their gradients one by one, for backwards in halves
// (parallel/pipeline/split_backward.hpp).
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <typeinfo>

namespace isograd::differentiable {

void declare_separable(const std::type_info& node);

// Whether calls of this node for different inputs cost together what one call for all of them costs: one of
// LibTorch's own, or declared. False of all others: a backward in halves calls them once, for all inputs.
bool is_separable(torch::autograd::Node& node);

// As an object beside them, at namespace scope: the backward of each of these functions computes those
// gradients that context->needs_input_grad() asks for and nothing of the others, and exchanges nothing with
// other ranks.
template <typename... Functions>
struct Separable {
  Separable() { (declare_separable(typeid(torch::autograd::CppNode<Functions>)), ...); }
};

}  // namespace isograd::differentiable
