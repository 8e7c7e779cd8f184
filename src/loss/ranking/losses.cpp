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

RankingCore recall_core(const RecallOptions& options) {
  const RateRule rule{.quantile = options.quantile, .interpolation = options.interpolation};
  RankingCore core([rule](const auto& pool, auto* gradient) { return mean_rate(pool, rule, gradient); });
  core.fingerprint =
      hash_name(fmt::format("{} {}", options.quantile, static_cast<int>(options.interpolation)));
  core.rates = rule;
  return core;
}

RankingCore pauc_core(const PAUCOptions& options) {
  const Band band = band_of(options);
  RankingCore core([band](const auto& pool, auto* gradient) { return partial_auc(pool, band, gradient); });
  core.fingerprint = hash_name(fmt::format("{} {} {} {} {} {} {} {}", band.alpha, band.beta, band.pairwise,
                                           band.by_band, band.live_only, band.population, band.knots,
                                           static_cast<int>(band.interpolation)));
  core.shards_work = band.pairwise;
  if (!band.pairwise)
    core.rates = RateRule{.quantile = {}, .band = band, .interpolation = options.interpolation};
  return core;
}

RankingCore smooth_ap_core() {
  RankingCore core([](const auto& pool, auto* gradient) { return smooth_ap(pool, gradient); });
  core.fingerprint = 1, core.shards_work = true;
  return core;
}

}  // namespace

SmoothAPLoss::SmoothAPLoss(RankingOptions options, Group group)
    : RankingLoss("SmoothAPLoss", options, std::move(group), smooth_ap_core()) {
  check(options.thresholds != Thresholds::kSelect, "thresholds", "kSelect", "kAuto: it has no thresholds");
}

RecallAtQuantileLoss::RecallAtQuantileLoss(RecallOptions options, Group group)
    : RankingLoss("RecallAtQuantileLoss", options, std::move(group), recall_core(options)) {
  check(options.quantile > 0 && options.quantile < 1, "quantile", fmt::format("{}", options.quantile),
        "between 0 and 1");
}

PAUCAtBudgetLoss::PAUCAtBudgetLoss(PAUCOptions options, Group group)
    : RankingLoss("PAUCAtBudgetLoss", options, std::move(group), pauc_core(options)) {
  check(options.alpha >= 0 && options.alpha < 1, "alpha", fmt::format("{}", options.alpha),
        "from 0 to below beta");
  check(options.beta > options.alpha && options.beta <= 1, "beta", fmt::format("{}", options.beta),
        fmt::format("above alpha ({}), at most 1", options.alpha));
  check(options.n_knots >= 2, "n_knots", fmt::format("{}", options.n_knots), "2 or more");
  check(options.surrogate != PAUCOptions::Surrogate::kPairwise || options.thresholds != Thresholds::kSelect,
        "thresholds", "kSelect with pairs", "kAuto: pairs need the rows themselves");
}

}  // namespace isograd
