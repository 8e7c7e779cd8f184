#include "comm/gradient_place.hpp"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

namespace isograd::differentiable {

namespace impl = torch::autograd::impl;

GradientPlace::Taken take_gradient_place(const at::Tensor& parameter, at::ScalarType type) {
  if (!parameter.defined() || !parameter.is_leaf() || !parameter.requires_grad()) return {};
  auto* place = dynamic_cast<GradientPlace*>(impl::post_acc_grad_hooks(parameter).get());
  if (!place) return {};
  const auto* asked = torch::autograd::get_current_graph_task_exec_info();
  if (!asked || !asked->empty()) return {};  // autograd::grad() lists the nodes whose gradients it returns
  const auto node = impl::try_get_grad_accumulator(parameter);
  if (!node || !node->tensor_pre_hooks().empty() || !node->pre_hooks().empty() || !node->post_hooks().empty())
    return {};
  return place->take(parameter, type);
}

at::Tensor gradient_in(const at::Tensor& memory, const at::Tensor& parameter) {
  if (memory.scalar_type() == parameter.scalar_type()) return memory;
  return at::empty(parameter.sizes(), parameter.options().layout(at::kSparse));
}

}  // namespace isograd::differentiable
