// The twin of the ranking losses: O(P·M) tensors and autograd over the whole pool of one process, after the
// formulas of docs/ranking.md. Shares no code with the losses.
#pragma once

#include <ATen/ATen.h>

#include <string>

#include "isograd/ranking.hpp"

namespace isograd::twin {

struct Pool {
  at::Tensor scores;   // [M, C], differentiable
  at::Tensor targets;  // [M] int64
  at::Tensor iid;      // [M] bool
  at::Tensor live;     // [M] bool
  at::Tensor weights;  // [M]
};

struct OfClass {
  at::Tensor value;  // mean contribution: 1 − loss
  bool valid = false;
};

inline at::Tensor quantile(const at::Tensor& values, double q, Interpolation interpolation) {
  static const char* const names[] = {"linear", "lower", "higher", "nearest", "midpoint"};
  return at::quantile(values.detach(), at::full({}, q, values.options().requires_grad(false)), 0, false,
                      names[static_cast<int>(interpolation)]);
}

inline at::Tensor weighted_mean(const at::Tensor& values, const at::Tensor& weights) {
  return (values * weights).sum() / weights.sum();
}

inline OfClass smooth_ap(const Pool& pool, const at::Tensor& s, const at::Tensor& positive, double tau) {
  const at::Tensor index = positive.nonzero().squeeze(1), w = pool.weights.index_select(0, index);
  const std::int64_t count = index.numel();
  if (count == 0 || count == s.numel() || w.sum().item<double>() == 0) return {};
  const at::Tensor others =
      at::ones({count, s.numel()}, s.options().requires_grad(false)).scatter(1, index.unsqueeze(1), 0.0);
  const at::Tensor sigma =
      at::sigmoid((s.unsqueeze(0) - s.index_select(0, index).unsqueeze(1)) / tau) * others;  // [P, M]
  const at::Tensor a = 1 + sigma.sum(1), p = 1 + sigma.index_select(1, index).sum(1);
  return {weighted_mean(p / a, w), true};
}

inline OfClass recall(const Pool& pool, const at::Tensor& s, const at::Tensor& positive, double tau,
                      const RecallOptions& options) {
  const at::Tensor index = positive.nonzero().squeeze(1), w = pool.weights.index_select(0, index);
  if (index.numel() == 0 || w.sum().item<double>() == 0) return {};
  const at::Tensor threshold = quantile(s, 1 - options.quantile, options.interpolation);
  return {weighted_mean(at::sigmoid((s.index_select(0, index) - threshold) / tau), w), true};
}

inline OfClass pauc(const Pool& pool, const at::Tensor& s, const at::Tensor& positive, double tau,
                    const PAUCOptions& options) {
  const at::Tensor negative = positive.logical_not(), iid_negative = negative.logical_and(pool.iid);
  at::Tensor counted = positive;
  if (options.pos_numerator == PAUCOptions::Numerator::kLive) counted = counted.logical_and(pool.live);
  const at::Tensor index = counted.nonzero().squeeze(1), w = pool.weights.index_select(0, index);
  if (index.numel() == 0 || !iid_negative.any().item<bool>() || w.sum().item<double>() == 0) return {};
  const bool population = options.budget_basis == PAUCOptions::Basis::kPopulation;
  const at::Tensor reference = s.masked_select(population ? pool.iid : iid_negative);
  const auto at = [&](double q) { return quantile(reference, q, options.interpolation); };
  const at::Tensor t_alpha = at(1 - options.alpha), t_beta = at(1 - options.beta);
  const at::Tensor scale =
      options.tau_scale == PAUCOptions::Scale::kBand ? t_alpha - t_beta : at(0.75) - at(0.25);
  if (scale.item<double>() <= 1e-12) return {};
  const at::Tensor tau_eff = tau * scale, own = s.index_select(0, index);
  if (options.surrogate == PAUCOptions::Surrogate::kPairwise) {
    const at::Tensor band = negative.logical_and(s.detach().ge(t_beta)).logical_and(s.detach().le(t_alpha));
    if (!band.any().item<bool>()) return {};
    const at::Tensor pairs =
        at::sigmoid((own.unsqueeze(1) - s.masked_select(band).unsqueeze(0)) / tau_eff).mean(1);
    return {weighted_mean(pairs, w), true};
  }
  at::Tensor area = at::zeros_like(own);
  for (std::int64_t k = 0; k < options.n_knots; ++k) {
    const double f = options.alpha + (options.beta - options.alpha) * static_cast<double>(k) /
                                         static_cast<double>(options.n_knots - 1);
    const bool end = k == 0 || k + 1 == options.n_knots;
    area = area + (end ? 0.5 : 1.0) * at::sigmoid((own - at(1 - f)) / tau_eff);
  }
  return {weighted_mean(area / static_cast<double>(options.n_knots - 1), w), true};
}

// The whole loss; kNone summed over the valid classes.
template <typename OneClass>
at::Tensor loss(const Pool& pool, std::int64_t classes, LossReduction reduction, const OneClass& one_class) {
  at::Tensor sum = pool.scores.sum() * 0;
  double valid = 0;
  for (std::int64_t c = 0; c < classes; ++c) {
    const OfClass of = one_class(pool, pool.scores.select(1, c), pool.targets.eq(classes == 1 ? 1 : c));
    if (!of.valid) continue;
    sum = sum + (1 - of.value);
    ++valid;
  }
  return reduction == LossReduction::kMean && valid > 0 ? sum / valid : sum;
}

inline at::Tensor column(const std::vector<double>& values) {
  return at::tensor(values, at::kDouble).unsqueeze(1).requires_grad_(true);
}
inline at::Tensor labels(const std::vector<std::int64_t>& values) { return at::tensor(values, at::kLong); }
inline RankingOptions plain(double temperature) {
  RankingOptions options;
  options.queue_size = 0, options.temperature = temperature;
  return options;
}
template <typename Options>
Options plain_as(double temperature) {
  Options options;
  options.queue_size = 0, options.temperature = temperature;
  return options;
}

}  // namespace isograd::twin
