// Regression losses and importance-ratio losses of reinforcement learning, token by token.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "loss/checks.hpp"
#include "loss/clip.hpp"

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

// [T] in fp64: w_i · mean over a token's elements of each(prediction − target). Only `each`, a function of
// all elements, differs between regression losses.
template <typename Each>
at::Tensor regression_losses(const std::string& where, const at::Tensor& prediction, const at::Tensor& target,
                             const at::Tensor& weights, const Each& each) {
  check_same(where, "prediction and target", prediction, target);
  const std::int64_t tokens = prediction.size(0);
  const std::int64_t elements = tokens > 0 ? prediction.numel() / tokens : 0;
  const TokenWeights of = token_weights(where, weights, {}, tokens, prediction.device());
  const auto type = computing_type(prediction.scalar_type());
  // Chosen before anything is computed of them, so that a NaN of an invalid token meets a 0 in neither
  // direction.
  const at::Tensor error =
      at::where(with_dims_of(of.mask, prediction), prediction.to(type) - target.to(type), 0.0);
  const at::Tensor sums = each(error).reshape({tokens, elements}).sum(1, false, at::kDouble);
  return sums * (of.weights / std::max<std::int64_t>(elements, 1));
}

at::Tensor squared_errors(const at::Tensor& prediction, const at::Tensor& target, const at::Tensor& weights) {
  return regression_losses("squared_error_sum", prediction, target, weights,
                           [](const at::Tensor& error) { return error.square(); });
}

// A constant [T] next to the log-probabilities, in their computing type.
at::Tensor constant(const std::string& where, const std::string& name, const at::Tensor& values,
                    const at::Tensor& log_probabilities) {
  check_type(where, name, values);
  if (values.sizes() != log_probabilities.sizes() || values.device() != log_probabilities.device())
    refuse(where,
           fmt::format("{} {} on {}, log-probabilities {} on {}", name, c10::str(values.sizes()),
                       values.device().str(), c10::str(log_probabilities.sizes()),
                       log_probabilities.device().str()),
           "one value for each token, on one device", "Flatten the leading dims of both");
  return values.detach().to(computing_type(log_probabilities.scalar_type()));
}

void check_log_probabilities(const std::string& where, const at::Tensor& values) {
  check_type(where, "log-probabilities", values);
  if (values.dim() != 1)
    refuse(where, fmt::format("log-probabilities {}", c10::str(values.sizes())), "[T]", "Flatten them");
}

// e^d − d − 1 ≥ 0.
at::Tensor excess(const at::Tensor& difference) { return difference.expm1() - difference; }

// Σ w_i values_i in fp64, returned in the computing type.
at::Tensor weighted_sum(const at::Tensor& values, const TokenWeights& tokens) {
  return (values.to(at::kDouble) * tokens.weights).sum().to(computing_type(values.scalar_type()));
}

}  // namespace

at::Tensor squared_error_sum(const at::Tensor& prediction, const at::Tensor& target,
                             const at::Tensor& weights) {
  return squared_errors(prediction, target, weights).sum().to(computing_type(prediction.scalar_type()));
}

at::Tensor flow_matching_losses(const at::Tensor& velocity, const at::Tensor& x0, const at::Tensor& x1,
                                const at::Tensor& weights) {
  const std::string where = "flow_matching_sum";
  check_same(where, "velocity and x0", velocity, x0);
  check_same(where, "x0 and x1", x0, x1);
  const auto type = computing_type(velocity.scalar_type());
  return squared_errors(velocity, x1.to(type) - x0.to(type), weights);
}

at::Tensor flow_matching_sum(const at::Tensor& velocity, const at::Tensor& x0, const at::Tensor& x1,
                             const at::Tensor& weights) {
  return flow_matching_losses(velocity, x0, x1, weights).sum().to(computing_type(velocity.scalar_type()));
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

PolicyLoss policy_gradient(const at::Tensor& log_probabilities, const at::Tensor& advantages,
                           const PolicyGradientOptions& options) {
  const std::string where = "policy_gradient";
  check_log_probabilities(where, log_probabilities);
  const auto type = computing_type(log_probabilities.scalar_type());
  const TokenWeights tokens =
      token_weights(where, options.weights, {}, log_probabilities.size(0), log_probabilities.device());
  // Invalid tokens are cut off before anything is computed of them.
  const auto valid = [&](const at::Tensor& values) { return at::where(tokens.mask, values, 0.0); };
  const at::Tensor log_p = valid(log_probabilities.to(type));
  const at::Tensor advantage = valid(constant(where, "advantages", advantages, log_probabilities));
  const bool clips = options.clip_low >= 0 || options.clip_high >= 0;
  if (!options.old_log_probabilities.defined()) {
    if (clips)
      refuse(where, "a clip without old log-probabilities", "both or neither",
             "Pass the log-probabilities of the policy that sampled");
    const at::Tensor zero = at::zeros({}, log_p.options());
    return {.sum = weighted_sum(log_p * advantage.neg(), tokens),
            .clipped = zero,
            .approximate_kl = zero.clone()};
  }
  if (clips && !(options.clip_low >= 0 && options.clip_low <= 1 && options.clip_high >= 0 &&
                 options.clip_high < std::numeric_limits<double>::infinity()))
    refuse(where, fmt::format("clip_low = {}, clip_high = {}", options.clip_low, options.clip_high),
           "clip_low from 0 to 1 and clip_high of 0 or more, or both negative (no clip)",
           "Set both, 0.2 and 0.2 in the paper");
  const at::Tensor log_ratio = log_p - valid(constant(where, "old log-probabilities",
                                                      options.old_log_probabilities, log_probabilities));
  PolicyLoss result;
  at::Tensor clipped = at::zeros_like(tokens.mask), bound;
  if (clips) {
    const double low = 1 - options.clip_low, high = 1 + options.clip_high;
    clipped = clip_binds(log_ratio.detach().exp(), advantage, low, high);
    const auto number = [&](double x) { return at::full({}, x, advantage.options()); };
    bound = at::where(advantage.gt(0), number(high), number(low)) * advantage;
  }
  // A clipped ratio is not computed again: one that overflowed would turn its zero gradient into a NaN.
  at::Tensor surrogate = at::where(clipped, 0.0, log_ratio).exp() * advantage;
  if (clips) surrogate = at::where(clipped, bound, surrogate);
  result.sum = weighted_sum(surrogate.neg(), tokens);
  result.clipped = weighted_sum(clipped.to(type), tokens);
  result.approximate_kl = weighted_sum(excess(log_ratio.detach()), tokens);
  return result;
}

at::Tensor reference_kl_sum(const at::Tensor& log_probabilities,
                            const at::Tensor& reference_log_probabilities, const at::Tensor& weights) {
  const std::string where = "reference_kl_sum";
  check_log_probabilities(where, log_probabilities);
  const TokenWeights tokens =
      token_weights(where, weights, {}, log_probabilities.size(0), log_probabilities.device());
  const at::Tensor reference =
      constant(where, "reference log-probabilities", reference_log_probabilities, log_probabilities);
  const at::Tensor difference = at::where(
      tokens.mask, reference - log_probabilities.to(computing_type(log_probabilities.scalar_type())), 0.0);
  return weighted_sum(excess(difference), tokens);
}

}  // namespace isograd
