// Shared by the tests of the losses: leaves, distances, finite differences, the text of a refusal.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "base/error_testing.hpp"
#include "isograd/batch.hpp"
#include "isograd/error.hpp"

namespace isograd {

using error_testing::error_of;

inline at::Tensor leaf(const at::Tensor& values) { return values.detach().clone().requires_grad_(true); }

// ‖a − b‖ / ‖b‖, or ‖a − b‖ when b is zero.
inline double relative(const at::Tensor& a, const at::Tensor& b) {
  const auto norm = b.to(at::kDouble).norm().item<double>();
  return (a.to(at::kDouble) - b.to(at::kDouble)).norm().item<double>() / (norm > 0 ? norm : 1);
}

inline at::Tensor gradient_of(const at::Tensor& loss, const at::Tensor& of) {
  return torch::autograd::grad({loss}, {of})[0];
}

// The largest distance between `gradient` and central differences of `loss` at `at`, relative to the largest
// element. fp64: error of the difference about step², of its rounding about 2^-53 / step.
inline double off_from_differences(const std::function<at::Tensor(const at::Tensor&)>& loss,
                                   const at::Tensor& at, const at::Tensor& gradient) {
  constexpr double kStep = 1e-5;
  const at::NoGradGuard none;
  const at::Tensor point = at.detach().clone(), flat = point.view({-1}), wanted = gradient.reshape({-1});
  double worst = 0, largest = 0;
  for (std::int64_t i = 0; i < flat.numel(); ++i) {
    const double value = flat[i].item<double>();
    flat[i] = value + kStep;
    const double above = loss(point).item<double>();
    flat[i] = value - kStep;
    const double below = loss(point).item<double>();
    flat[i] = value;
    const double found = wanted[i].item<double>();
    worst = std::max(worst, std::abs((above - below) / (2 * kStep) - found));
    largest = std::max(largest, std::abs(found));
  }
  return worst / std::max(largest, 1e-300);
}

// Every third token from the second on has no target.
inline at::Tensor some_targets(std::int64_t rows, std::int64_t vocabulary) {
  at::Tensor targets = at::randint(vocabulary, {rows}, at::kLong);
  for (std::int64_t t = 1; t < rows; t += 3) targets[t] = kIgnoreIndex;
  return targets;
}

// Weights between 0.5 and 1.5, every fifth 0.
inline at::Tensor some_weights(std::int64_t rows) {
  at::Tensor weights = at::rand({rows}, at::kDouble) + 0.5;
  for (std::int64_t t = 2; t < rows; t += 5) weights[t] = 0;
  return weights;
}

}  // namespace isograd
