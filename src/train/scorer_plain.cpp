// The scorer's losses by plain code that shares nothing with isograd/ranking.hpp: verify's oracle.
#include <ATen/ATen.h>

#include "isograd/ranking.hpp"
#include "train/scorer_task.hpp"

namespace isograd {
namespace {

at::Tensor of(const at::Tensor& values, const at::Tensor& mask) {
  return values.index_select(0, mask.nonzero().squeeze(1));
}

at::Tensor threshold(const at::Tensor& scores, double q) {
  return at::quantile(scores.detach(), at::full({}, q, scores.options().requires_grad(false)), 0, false,
                      "higher");
}

// σ whose derivative σ(x) σ(−x) does not cancel where it is saturated, as at::sigmoid's does.
at::Tensor soft_step(const at::Tensor& x) {
  return at::log_sigmoid(x).exp();
}

}  // namespace

at::Tensor plain_ranking_loss(const std::string& name, const RunConfig& config, const at::Tensor& logits,
                              const at::Tensor& targets) {
  const at::Tensor s = logits.select(1, 0), y = targets.to(s.scalar_type());
  const at::Tensor positive = of(s, targets.eq(1)), negative = of(s, targets.eq(0));
  if (name == "cross_entropy")
    return -(at::log_sigmoid(s) * y + at::log_sigmoid(-s) * (1 - y)).sum() / s.numel();
  if (name == "sigmoid_focal") {
    const at::Tensor wrong = soft_step(-s) * y + soft_step(s) * (1 - y);
    const at::Tensor surprise = -(at::log_sigmoid(s) * y + at::log_sigmoid(-s) * (1 - y));
    return ((0.25 * y + 0.75 * (1 - y)) * wrong.square() * surprise).sum() / s.numel();
  }
  if (positive.numel() == 0) return s.sum() * 0;
  const double given = config.ranking.temperature;
  if (name == "recall_at_quantile") {
    const double tau = given > 0 ? given : RankingOptions().temperature;
    return 1 -
           soft_step((positive - threshold(s, 1 - config.ranking.quantile)) / tau).sum() / positive.numel();
  }
  if (negative.numel() == 0) return s.sum() * 0;
  if (name == "smooth_ap") {
    const double tau = given > 0 ? given : RankingOptions().temperature;
    const auto rank_among = [&](const at::Tensor& others) {
      return soft_step((others.unsqueeze(0) - positive.unsqueeze(1)) / tau).sum(1);
    };
    const at::Tensor above = rank_among(positive) + 0.5;  // a positive meets itself as 0.5, where 1 is meant
    return 1 - (above / (above + rank_among(negative))).sum() / positive.numel();
  }
  const double alpha = config.ranking.alpha, beta = config.ranking.budget;
  const at::Tensor scale = threshold(negative, 0.75) - threshold(negative, 0.25);
  if (scale.item<double>() <= 1e-12) return s.sum() * 0;
  const at::Tensor tau = scale * (given > 0 ? given : PAUCOptions().temperature);
  const at::Tensor low = threshold(negative, 1 - beta), high = threshold(negative, 1 - alpha);
  if (name == "pauc") {
    const auto rate = [&](const at::Tensor& edge) {
      return soft_step((positive - edge) / tau).sum() / positive.numel();
    };
    return 1 - 0.5 * (rate(low) + rate(high));
  }
  const at::Tensor band = of(negative, negative.detach().ge(low).logical_and(negative.detach().le(high)));
  const at::Tensor pairs = soft_step((positive.unsqueeze(1) - band.unsqueeze(0)) / tau);
  return 1 - pairs.sum() / pairs.numel();
}

}  // namespace isograd
