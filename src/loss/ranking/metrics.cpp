#include <ATen/ATen.h>

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <limits>

#include "isograd/ranking.hpp"
#include "loss/checks.hpp"
#include "loss/ranking/pool.hpp"

namespace isograd {
namespace {

RankingMetrics metrics_of(const RankingPool& pool, double quantile, double budget) {
  if (!(quantile > 0 && quantile < 1))
    refuse("ranking_metrics: quantile", fmt::format("{}", quantile), "between 0 and 1",
           "Set it in that range");
  if (!(budget > 0 && budget <= 1))
    refuse("ranking_metrics: budget", fmt::format("{}", budget), "above 0, at most 1",
           "Set it in that range");
  RankingMetrics metrics{.rows = pool.size()};
  const at::Tensor scores = pool.scores.view({-1}).to(at::kDouble);
  const at::Tensor order = scores.argsort(0, /*descending=*/true);
  const auto* at = order.const_data_ptr<std::int64_t>();
  const auto* score = scores.const_data_ptr<double>();
  for (const auto label : pool.labels) metrics.positives += label;
  const auto positives = static_cast<double>(metrics.positives);
  const double negatives = static_cast<double>(metrics.rows) - positives;
  if (metrics.positives == 0) return metrics;
  const double places = std::ceil(quantile * static_cast<double>(metrics.rows));
  double above = 0, found = 0;  // rows, and positives, with a higher score
  for (std::int64_t i = 0; i < metrics.rows;) {
    double tied = 0, hits = 0;
    for (const double level = score[at[i]]; i < metrics.rows && score[at[i]] == level; ++i, ++tied)
      hits += static_cast<double>(pool.labels[static_cast<std::size_t>(at[i])]);
    metrics.average_precision += hits / positives * (found + hits) / (above + tied);
    metrics.recall_at_quantile += hits / positives * std::clamp((places - above) / tied, 0.0, 1.0);
    // A straight segment of the ROC curve, cut where the budget ends.
    const double begin = (above - found) / negatives, width = (tied - hits) / negatives;
    if (width > 0 && begin < budget) {
      const double part = std::min(1.0, (budget - begin) / width);
      metrics.partial_auc += part * width * (found + 0.5 * part * hits) / positives / budget;
    }
    above += tied, found += hits;
  }
  return metrics;
}

}  // namespace

RankingMetrics ranking_metrics(Group& group, const at::Tensor& scores, const at::Tensor& targets,
                               double quantile, double budget) {
  const std::string where = "ranking_metrics";
  const at::Tensor column = scores.defined() && scores.dim() == 1 ? scores.detach().unsqueeze(1) : scores;
  const LocalRows local = local_rows(where, 1, -100, column, targets, {}, {});
  RankingExchange header;
  const RowCounts counts = exchange_headers(where, group, local, header);
  if (!header.finite) {
    constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
    at::Tensor positives = at::full({1}, std::count(local.labels.begin(), local.labels.end(), 1), at::kLong);
    if (group.size() > 1) group.all_reduce(positives);
    return {.rows = counts.total(),
            .positives = positives.item<std::int64_t>(),
            .average_precision = kNaN,
            .recall_at_quantile = kNaN,
            .partial_auc = kNaN};
  }
  return metrics_of(gather_rows(group, local, counts), quantile, budget);
}

RankingMetrics ranking_metrics(const at::Tensor& scores, const at::Tensor& targets, double quantile,
                               double budget) {
  Group alone = Group::solo();
  return ranking_metrics(alone, scores, targets, quantile, budget);
}

}  // namespace isograd
