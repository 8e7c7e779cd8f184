#include "matmul/product.hpp"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace isograd {
namespace {

// LibTorch registers its oneDNN product (made for compiled graphs) by name only.
using Linear = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                          std::string_view, c10::List<std::optional<at::Scalar>>,
                          std::optional<std::string_view>);
using LinearPlus = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                              const std::optional<at::Tensor>&, std::string_view);

struct OneDnn {
  c10::TypedOperatorHandle<Linear> linear;
  c10::TypedOperatorHandle<LinearPlus> linear_plus;
};

// Absent in builds of LibTorch without oneDNN.
const std::optional<OneDnn>& one_dnn() {
  static const std::optional<OneDnn> found = []() -> std::optional<OneDnn> {
    if (!at::hasMKLDNN()) return std::nullopt;
    auto& dispatcher = c10::Dispatcher::singleton();
    const auto linear = dispatcher.findSchema({"mkldnn::_linear_pointwise", ""});
    const auto linear_plus = dispatcher.findSchema({"mkldnn::_linear_pointwise", "binary"});
    if (!linear || !linear_plus) return std::nullopt;
    return OneDnn{linear->typed<Linear>(), linear_plus->typed<LinearPlus>()};
  }();
  return found;
}

constexpr std::int64_t kFewRows = 8;  // below, preparing the operands costs more than it saves

bool takes_one_dnn(const at::Tensor& a, const at::Tensor& b) {
  return a.is_cpu() && (a.scalar_type() == at::kFloat || a.scalar_type() == at::kBFloat16) &&
         a.size(0) >= kFewRows && a.numel() > 0 && b.numel() > 0 && at::globalContext().userEnabledMkldnn() &&
         one_dnn().has_value();
}

}  // namespace

at::Tensor product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& addend,
                   const at::Tensor& bias) {
  if (!takes_one_dnn(a, b)) return naive::product(a, b, addend, bias);
  const std::optional<at::Tensor> row = bias.defined() ? std::optional(bias) : std::nullopt;
  if (addend.defined()) return one_dnn()->linear_plus.call(a, addend, b, row, "add");
  return one_dnn()->linear.call(a, b, row, "none", c10::List<std::optional<at::Scalar>>(), "");
}

namespace naive {

at::Tensor product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& addend,
                   const at::Tensor& bias) {
  at::Tensor result;
  if (bias.defined())
    result = at::addmm(bias, a, b.t());
  else
    return addend.defined() ? at::addmm(addend, a, b.t()) : at::mm(a, b.t());
  return addend.defined() ? result.add_(addend) : result;
}

}  // namespace naive
}  // namespace isograd
