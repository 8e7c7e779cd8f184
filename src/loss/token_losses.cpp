// Regression losses over tokens: squared error, flow matching.
#include "isograd/loss.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "loss/checks.hpp"

namespace isograd {
namespace {

void check_same(const std::string& where, const char* names, const at::Tensor& a, const at::Tensor& b) {
  check_type(where, names, a);
  check_type(where, names, b);
  if (a.dim() < 1 || a.sizes() != b.sizes() || a.device() != b.device())
    refuse(where,
           fmt::format("{} {} on {} and {} on {}", names, c10::str(a.sizes()), a.device().str(),
                       c10::str(b.sizes()), b.device().str()),
           "one shape [T, ...] on one device", "Flatten the leading dims of both");
}

// [T] seen as [T, 1, ...].
at::Tensor with_dims_of(const at::Tensor& of_tokens, const at::Tensor& values) {
  std::vector<std::int64_t> shape(values.dim(), 1);
  shape[0] = of_tokens.size(0);
  return of_tokens.view(shape);
}

at::Tensor error_sum(const std::string& where, const at::Tensor& prediction, const at::Tensor& wanted,
                     const at::Tensor& weights) {
  const std::int64_t tokens = prediction.size(0);
  const TokenWeights of = token_weights(where, weights, {}, tokens, prediction.device());
  const auto type = computing_type(prediction.scalar_type());
  // Chosen before the square, so that a NaN of an invalid token meets a 0 in neither direction.
  const at::Tensor error = at::where(with_dims_of(of.mask, prediction), prediction.to(type) - wanted, 0.0);
  const double elements = static_cast<double>(prediction.numel()) / static_cast<double>(tokens);
  const at::Tensor squares = error.square().reshape({tokens, -1}).sum(1, false, at::kDouble);
  return (squares * (of.weights / elements)).sum().to(type);
}

}  // namespace

at::Tensor squared_error_sum(const at::Tensor& prediction, const at::Tensor& target,
                             const at::Tensor& weights) {
  const std::string where = "squared_error_sum";
  check_same(where, "prediction and target", prediction, target);
  if (prediction.numel() == 0) {
    token_weights(where, weights, {}, prediction.size(0), prediction.device());
    return prediction.to(computing_type(prediction.scalar_type())).square().sum();
  }
  return error_sum(where, prediction, target.to(computing_type(prediction.scalar_type())), weights);
}

at::Tensor flow_matching_sum(const at::Tensor& velocity, const at::Tensor& x0, const at::Tensor& x1,
                             const at::Tensor& weights) {
  const std::string where = "flow_matching_sum";
  check_same(where, "velocity and x0", velocity, x0);
  check_same(where, "x0 and x1", x0, x1);
  const auto type = computing_type(velocity.scalar_type());
  return squared_error_sum(velocity, x1.to(type) - x0.to(type), weights);
}

at::Tensor flow_matching_input(const at::Tensor& x0, const at::Tensor& x1, const at::Tensor& t) {
  const std::string where = "flow_matching_input";
  check_same(where, "x0 and x1", x0, x1);
  if (t.dim() != 1 || t.size(0) != x0.size(0) || !t.is_floating_point())
    refuse(where, fmt::format("t {} of {}", c10::str(t.sizes()), c10::toString(t.scalar_type())),
           fmt::format("t [{}], floating, one for each token", x0.size(0)), "Pass one time for each token");
  if (!t.ge(0).logical_and(t.le(1)).all().item<bool>())
    refuse(where, "a time outside [0, 1]", "0 (noise) to 1 (data)", "Rescale t");
  const auto type = computing_type(x0.scalar_type());
  const at::Tensor time = with_dims_of(t.to(type), x0);
  return ((1 - time) * x0.to(type) + time * x1.to(type)).to(x0.scalar_type());
}

}  // namespace isograd
