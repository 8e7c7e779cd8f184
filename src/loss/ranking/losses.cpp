// The three ranking losses: their options, and which core computes them.
#include <fmt/format.h>

#include "isograd/random.hpp"
#include "isograd/ranking.hpp"
#include "loss/ranking/cores.hpp"

namespace isograd {
namespace {

Band band_of(const PAUCOptions& options) {
  return {.alpha = options.alpha,
          .beta = options.beta,
          .pairwise = options.surrogate == PAUCOptions::Surrogate::kPairwise,
          .by_band = options.tau_scale == PAUCOptions::Scale::kBand,
          .live_only = options.pos_numerator == PAUCOptions::Numerator::kLive,
          .population = options.budget_basis == PAUCOptions::Basis::kPopulation,
          .knots = options.n_knots,
          .interpolation = options.interpolation};
}

}  // namespace

SmoothAPLoss::SmoothAPLoss(RankingOptions options, Group group)
    : RankingLoss("SmoothAPLoss", options, std::move(group)) {
  check(options.thresholds != Thresholds::kSelect, "thresholds", "kSelect", "kAuto: it has no thresholds");
}
ClassResult SmoothAPLoss::compute(const ClassPool<float>& pool, float* gradient) const {
  return smooth_ap(pool, gradient);
}
ClassResult SmoothAPLoss::compute(const ClassPool<double>& pool, double* gradient) const {
  return smooth_ap(pool, gradient);
}

RecallAtQuantileLoss::RecallAtQuantileLoss(RecallOptions options, Group group)
    : RankingLoss("RecallAtQuantileLoss", options, std::move(group)),
      quantile_(options.quantile),
      interpolation_(options.interpolation) {
  check(quantile_ > 0 && quantile_ < 1, "quantile", fmt::format("{}", quantile_), "between 0 and 1");
}
std::uint64_t RecallAtQuantileLoss::fingerprint() const {
  return hash_name(fmt::format("{} {}", quantile_, static_cast<int>(interpolation_)));
}
std::optional<RateRule> RecallAtQuantileLoss::rates() const {
  return RateRule{.quantile = quantile_, .interpolation = interpolation_};
}
ClassResult RecallAtQuantileLoss::compute(const ClassPool<float>& pool, float* gradient) const {
  return mean_rate(pool, *rates(), gradient);
}
ClassResult RecallAtQuantileLoss::compute(const ClassPool<double>& pool, double* gradient) const {
  return mean_rate(pool, *rates(), gradient);
}

PAUCAtBudgetLoss::PAUCAtBudgetLoss(PAUCOptions options, Group group)
    : RankingLoss("PAUCAtBudgetLoss", options, std::move(group)),
      band_(options),
      pairwise_(options.surrogate == PAUCOptions::Surrogate::kPairwise) {
  check(band_.alpha >= 0 && band_.alpha < 1, "alpha", fmt::format("{}", band_.alpha), "from 0 to below beta");
  check(band_.beta > band_.alpha && band_.beta <= 1, "beta", fmt::format("{}", band_.beta),
        fmt::format("above alpha ({}), at most 1", band_.alpha));
  check(band_.n_knots >= 2, "n_knots", fmt::format("{}", band_.n_knots), "2 or more");
  check(!pairwise_ || options.thresholds != Thresholds::kSelect, "thresholds", "kSelect with pairs",
        "kAuto: pairs need the rows themselves");
}
std::optional<RateRule> PAUCAtBudgetLoss::rates() const {
  if (pairwise_) return std::nullopt;
  return RateRule{.quantile = {}, .band = band_of(band_), .interpolation = band_.interpolation};
}
std::uint64_t PAUCAtBudgetLoss::fingerprint() const {
  const Band band = band_of(band_);
  return hash_name(fmt::format("{} {} {} {} {} {} {} {}", band.alpha, band.beta, band.pairwise, band.by_band,
                               band.live_only, band.population, band.knots,
                               static_cast<int>(band.interpolation)));
}
ClassResult PAUCAtBudgetLoss::compute(const ClassPool<float>& pool, float* gradient) const {
  return partial_auc(pool, band_of(band_), gradient);
}
ClassResult PAUCAtBudgetLoss::compute(const ClassPool<double>& pool, double* gradient) const {
  return partial_auc(pool, band_of(band_), gradient);
}

}  // namespace isograd
