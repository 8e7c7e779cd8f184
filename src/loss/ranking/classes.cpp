#include "loss/ranking/classes.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <set>
#include <span>

#include "loss/ranking/quantile.hpp"

namespace isograd {
namespace {

constexpr std::int64_t kSums = 3;  // of a class whose work is split: value, contributions, their squares

}  // namespace

template <typename T>
Computed compute_classes(const RankingPool& pool, const std::vector<std::int64_t>& chosen, double temperature,
                         bool wants_gradient, bool split, Group& group, const ClassCore<T>& compute) {
  Computed computed;
  const std::int64_t classes = pool.classes, whole = pool.size();
  const auto type = c10::CppTypeToScalarType<T>::value;
  at::Tensor by_class;  // gradients [C, live]
  if (wants_gradient) by_class = at::zeros({classes, pool.live}, at::TensorOptions(type));
  const bool all_rows = chosen.empty();
  const auto take = [&](auto& to, const auto& from) {
    if (all_rows) return to.assign(std::begin(from), std::end(from));
    to.clear();
    for (const auto row : chosen) to.push_back(from[static_cast<std::size_t>(row)]);
  };
  ClassPool<T> view;
  std::vector<double> weights;
  std::vector<std::int64_t> labels;
  if (!pool.weights.empty()) take(weights, pool.weights);
  view.weights = weights.empty() ? nullptr : weights.data();
  view.live =
      all_rows ? pool.live : std::lower_bound(chosen.begin(), chosen.end(), pool.live) - chosen.begin();
  view.temperature = temperature;
  if (split) view.share = group.rank(), view.shares = group.size();
  take(view.iid, pool.iid), take(labels, pool.labels);
  view.positive.resize(labels.size());
  std::vector<T> of_chosen;
  for (std::int64_t c = 0; c < classes; ++c) {
    take(view.scores,
         std::span(pool.scores.const_data_ptr<T>() + c * whole, static_cast<std::size_t>(whole)));
    for (std::size_t i = 0; i < labels.size(); ++i) view.positive[i] = labels[i] == (classes == 1 ? 1 : c);
    T* own = wants_gradient ? by_class.data_ptr<T>() + c * pool.live : nullptr;
    if (!wants_gradient || all_rows) {
      computed.classes.push_back(compute(view, own));
      continue;
    }
    of_chosen.assign(static_cast<std::size_t>(view.live), T(0));
    computed.classes.push_back(compute(view, of_chosen.data()));
    for (std::size_t i = 0; i < of_chosen.size(); ++i) own[chosen[i]] = of_chosen[i];
  }

  if (split && group.size() > 1) {
    at::Tensor sums = at::empty({classes, kSums}, at::kDouble);
    auto* sum = sums.data_ptr<double>();
    for (const auto& result : computed.classes)
      *sum++ = result.value, *sum++ = result.contributed, *sum++ = result.squared;
    if (wants_gradient) {
      // For each rank: the gradients of its rows, then the sums.
      std::vector<at::Tensor> message;
      Group::Rows parts;
      std::int64_t begin = 0;
      for (const auto rows : pool.rows) {
        message.push_back(by_class.narrow(1, begin, rows).reshape({-1}));
        message.push_back(sums.to(type).view({-1}));
        parts.push_back(classes * (rows + kSums));
        begin += rows;
      }
      const std::int64_t own_rows = pool.rows[static_cast<std::size_t>(group.rank())];
      at::Tensor received = at::empty({classes * (own_rows + kSums)}, type);
      group.reduce_scatter_async(received, at::cat(message), ReduceOp::kSum, parts).wait();
      by_class = received.narrow(0, 0, classes * own_rows).view({classes, own_rows});
      sums = received.narrow(0, classes * own_rows, classes * kSums).to(at::kDouble).contiguous();
      computed.own_only = true;
    } else {
      group.all_reduce(sums);
    }
    const double* total = sums.data_ptr<double>();
    for (auto& result : computed.classes)
      result.value = *total++, result.contributed = *total++, result.squared = *total++;
  }
  if (wants_gradient) computed.gradient = by_class.t().contiguous();
  return computed;
}

template <typename T>
Computed compute_by_selection(const RankingPool& own, std::int64_t rows, double temperature,
                              bool wants_gradient, const RateRule& rule, Group& group) {
  const std::int64_t classes = own.classes, here = own.size();
  const auto count = static_cast<std::size_t>(classes);
  std::vector<ClassPool<T>> views(count);
  std::vector<std::vector<T>> references;
  for (std::int64_t c = 0; c < classes; ++c) {
    ClassPool<T>& view = views[static_cast<std::size_t>(c)];
    const T* scores = own.scores.const_data_ptr<T>() + c * here;
    view.scores.assign(scores, scores + here);
    for (const auto label : own.labels) view.positive.push_back(label == (classes == 1 ? 1 : c));
    view.iid = own.iid;
    view.weights = own.weights.empty() ? nullptr : own.weights.data();
    view.live = own.live;
    view.temperature = temperature;
    references.push_back(rate_reference(view, rule));
  }
  const auto selected =
      select_over_ranks(group, references, rate_probabilities<T>(rule), rule.interpolation, rows);

  std::vector<RateSlopes> slopes(count);
  at::Tensor sums = at::empty({classes, RateSums::kCount}, at::kDouble);
  auto* sum = sums.data_ptr<double>();
  for (std::size_t c = 0; c < count; ++c) {
    const RateSums part =
        rate_sums(views[c], rule, selected.quantiles[c], wants_gradient ? &slopes[c] : nullptr);
    for (const double value : {part.weighted, part.mass, part.contributed, part.squared, part.positives,
                               part.iid_negatives, part.band_negatives})
      *sum++ = value;
  }
  group.all_reduce(sums);

  Computed computed;
  computed.own_only = true;
  if (wants_gradient)
    computed.gradient = at::zeros({own.live, classes}, at::TensorOptions(c10::CppTypeToScalarType<T>::value));
  const double* total = sums.data_ptr<double>();
  for (std::size_t c = 0; c < count; ++c, total += RateSums::kCount) {
    const RateSums whole{total[0], total[1], total[2], total[3], total[4], total[5], total[6]};
    computed.classes.push_back(rate_result(whole, rule, selected.quantiles[c], temperature));
    if (!wants_gradient || !computed.classes.back().valid) continue;
    T* gradient = computed.gradient.data_ptr<T>() + c;
    for (std::size_t i = 0; i < slopes[c].rows.size(); ++i)
      gradient[slopes[c].rows[i] * classes] = -static_cast<T>(slopes[c].slopes[i] / whole.mass);
  }
  return computed;
}

bool selects_thresholds(const RankingOptions& options, const RateRule& rule, const RowCounts& counts,
                        at::ScalarType type, std::size_t queued, int ranks) {
  if (ranks == 1 || options.max_pool_size > 0 || options.thresholds == Thresholds::kGather) return false;
  if (options.thresholds == Thresholds::kSelect) return true;
  const std::int64_t bytes = type == at::kDouble ? 8 : 4;
  const std::vector<double> q = rate_probabilities<double>(rule);
  const bool two =
      rule.interpolation == Interpolation::kLinear || rule.interpolation == Interpolation::kMidpoint;
  const std::int64_t statistics =
      static_cast<std::int64_t>(std::set<double>(q.begin(), q.end()).size()) * (two ? 2 : 1);
  const std::int64_t rounds = selection_rounds(static_cast<int>(8 * bytes));
  const std::int64_t histograms = options.num_classes * (1 + (rounds - 1) * statistics);
  // An all-reduce sends everything twice, an all-gather once; both (W - 1)/W of it.
  const std::int64_t counted =
      2 * (histograms * (std::int64_t{4} << kSelectionDigit) + options.num_classes * RateSums::kCount * 8);
  const std::int64_t kept = static_cast<std::int64_t>(queued) * counts.row_bytes;
  const std::int64_t collectives = rounds + 1 + (queued > 0 ? 1 : 0);
  return counted + kept + collectives * kCollectiveBytes <
         counts.total() * counts.row_bytes + kCollectiveBytes;
}

template Computed compute_classes(const RankingPool&, const std::vector<std::int64_t>&, double, bool, bool,
                                  Group&, const ClassCore<float>&);
template Computed compute_by_selection<float>(const RankingPool&, std::int64_t, double, bool, const RateRule&,
                                              Group&);
template Computed compute_classes(const RankingPool&, const std::vector<std::int64_t>&, double, bool, bool,
                                  Group&, const ClassCore<double>&);
template Computed compute_by_selection<double>(const RankingPool&, std::int64_t, double, bool,
                                               const RateRule&, Group&);

}  // namespace isograd
