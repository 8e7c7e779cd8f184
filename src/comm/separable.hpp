// The autograd functions that compute their gradients one by one, for split backwards
// (parallel/pipeline/split_backward.hpp).
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <typeindex>
#include <typeinfo>
#include <unordered_set>

namespace isograd::differentiable {

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

}  // namespace isograd::differentiable
