#include "comm/separable.hpp"

#include <typeindex>
#include <unordered_set>

namespace isograd::differentiable {
namespace {

// Written before main() and only read afterwards.
std::unordered_set<std::type_index>& declared() {
  static auto* types =
      new std::unordered_set<std::type_index>();  // never destroyed: threads may outlive statics
  return *types;
}

}  // namespace

void declare_separable(const std::type_info& node) {
  declared().insert(node);
}

bool is_separable(torch::autograd::Node& node) {
  // LibTorch generates its own nodes and guards each gradient by task_should_compute_output().
  return node.is_traceable() || declared().contains(typeid(node));
}

}  // namespace isograd::differentiable
