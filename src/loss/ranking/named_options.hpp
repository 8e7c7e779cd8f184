// Ranking losses by their names, with options from whatever has them by name: JSON of tests, Python's dicts.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "isograd/group.hpp"
#include "isograd/ranking.hpp"

namespace isograd {

// `take(name, value)` sets the value where there is an option of that name; a std::string for what has names.
template <typename Take, typename Enum>
void take_named(const Take& take, const char* option, const std::vector<std::string>& names, Enum& value) {
  std::string chosen = names.at(static_cast<std::size_t>(value));
  take(option, chosen);
  const auto found = std::find(names.begin(), names.end(), chosen);
  ISOGRAD_INVARIANT(found != names.end(), std::string("an unchecked option: ") + option + " = " + chosen);
  value = static_cast<Enum>(found - names.begin());
}

template <typename Take>
void take_options(const Take& take, RankingOptions& made) {
  take("num_classes", made.num_classes);
  take("queue_size", made.queue_size);
  take("temperature", made.temperature);
  take_named(take, "reduction", {"mean", "sum", "none"}, made.reduction);
  take("ignore_index", made.ignore_index);
  take("update_queue_in_eval", made.update_queue_in_eval);
  take("max_pool_size", made.max_pool_size);
  take_named(take, "grad_reduction", {"sum", "mean"}, made.grad_reduction);
  take("seed", made.seed);
  take("check_queue", made.check_queue);
  take_named(take, "thresholds", {"auto", "gather", "select"}, made.thresholds);
}

// `name`: SmoothAPLoss, RecallAtQuantileLoss or PAUCAtBudgetLoss.
template <typename Take>
std::shared_ptr<RankingLoss> ranking_loss_by_name(const std::string& name, const Take& take, Group group) {
  const std::vector<std::string> modes = {"linear", "lower", "higher", "nearest", "midpoint"};
  if (name == "RecallAtQuantileLoss") {
    RecallOptions made;
    take_options(take, made);
    take("quantile", made.quantile);
    take_named(take, "interpolation", modes, made.interpolation);
    return std::make_shared<RecallAtQuantileLoss>(made, std::move(group));
  }
  if (name == "PAUCAtBudgetLoss") {
    PAUCOptions made;
    take_options(take, made);
    take("alpha", made.alpha);
    take("beta", made.beta);
    take("n_knots", made.n_knots);
    take_named(take, "surrogate", {"trapezoid", "pairwise"}, made.surrogate);
    take_named(take, "tau_scale", {"iqr", "band"}, made.tau_scale);
    take_named(take, "pos_numerator", {"pool", "live"}, made.pos_numerator);
    take_named(take, "budget_basis", {"fpr", "population"}, made.budget_basis);
    take_named(take, "interpolation", modes, made.interpolation);
    return std::make_shared<PAUCAtBudgetLoss>(made, std::move(group));
  }
  ISOGRAD_INVARIANT(name == "SmoothAPLoss", "no ranking loss of that name: " + name);
  RankingOptions made;
  take_options(take, made);
  return std::make_shared<SmoothAPLoss>(made, std::move(group));
}

}  // namespace isograd
