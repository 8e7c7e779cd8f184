#include "loss/ranking/reduced.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "loss/checks.hpp"

namespace isograd {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

std::int64_t count_valid(const ClassValues& of) {
  const auto* valid = of.valid.const_data_ptr<bool>();
  return std::count(valid, valid + of.valid.numel(), true);
}

// One node for the reduction and its classes: backward is a product with what comes from above.
struct Reduced final : torch::autograd::Function<Reduced> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& scores, const at::Tensor& gradient,
                            const ClassValues* of) {
    const std::int64_t count = count_valid(*of);
    const bool all = count == of->valid.numel();
    context->save_for_backward({gradient, all ? at::Tensor() : of->valid.to(scores.device())});
    context->saved_data["type"] = static_cast<std::int64_t>(scores.scalar_type());
    context->saved_data["divisor"] =
        of->reduction == LossReduction::kMean ? std::max<std::int64_t>(count, 1) : std::int64_t{1};
    return reduced(*of).to(scores.device());
  }

  static variable_list backward(AutogradContext* context, variable_list upstream) {
    if (at::GradMode::is_enabled())
      refuse("a ranking loss", "a backward that is to be differentiated (create_graph)", "first derivatives",
             "Call backward() without create_graph");
    const variable_list saved = context->get_saved_variables();
    const auto type = static_cast<at::ScalarType>(context->saved_data["type"].toInt());
    at::Tensor above = upstream[0].detach();  // a scalar, or [C]
    const std::int64_t divisor = context->saved_data["divisor"].toInt();
    if (divisor > 1) above = above / static_cast<double>(divisor);
    if (saved[1].defined()) above = at::where(saved[1], above, at::zeros_like(above));
    return {(saved[0] * above).to(type), {}, {}};
  }
};

}  // namespace

at::Tensor reduced(const ClassValues& of) {
  if (of.reduction == LossReduction::kNone) return of.values.clone();
  const at::Tensor sum = of.values.sum();
  if (of.reduction != LossReduction::kMean) return sum;
  return sum / static_cast<double>(std::max<std::int64_t>(count_valid(of), 1));
}

at::Tensor reduced(const ClassValues& of, const at::Tensor& scores, const at::Tensor& gradient) {
  return Reduced::apply(scores, gradient.to(scores.device()), &of);
}

}  // namespace isograd
