#include "comm/linear_map.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "comm/anchor.hpp"

namespace isograd {
namespace {

// A collective and its dual, as the node's saved state.
struct Duals final : torch::CustomClassHolder {
  Duals(TensorMap a, TensorMap b) : forward(std::move(a)), backward(std::move(b)) {}
  TensorMap forward, backward;
};

struct Collective final : torch::autograd::Function<Collective> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                            const at::Tensor& /*anchor*/, const c10::intrusive_ptr<Duals>& duals) {
    context->saved_data["duals"] = c10::IValue::make_capsule(duals);
    return duals->forward(input);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto capsule = context->saved_data["duals"].toCapsule();
    return {static_cast<Duals*>(capsule.get())->backward(gradients[0]), {}, {}};
  }
};

}  // namespace

namespace differentiable {

const at::Tensor& anchor() {
  static const at::Tensor* leaf =
      new at::Tensor(at::zeros({0}).requires_grad_());  // never destroyed: threads may outlive statics
  return *leaf;
}

}  // namespace differentiable

at::Tensor apply_map(const at::Tensor& input, TensorMap forward, TensorMap backward) {
  const bool has_gradient = at::GradMode::is_enabled() && (at::isFloatingType(input.scalar_type()) ||
                                                           at::isComplexType(input.scalar_type()));
  if (!has_gradient) return forward(input.detach());
  // Other ranks need this rank in the backward even if nothing here needs a gradient.
  return Collective::apply(input, differentiable::anchor(),
                           c10::make_intrusive<Duals>(std::move(forward), std::move(backward)));
}

}  // namespace isograd
