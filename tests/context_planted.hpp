// What tests of whole steps over context ranks share besides: axes of shards, and the museum's mistakes.
#pragma once

#include <cmath>
#include <cstdlib>

#include <fmt/ranges.h>

#include "context_step.hpp"
#include "full_tests.hpp"

namespace isograd::context {

// Axes along which parameters may be sharded. Those that make the same groups (an axis of size 1) are one.
inline std::vector<AxisSet> shardings_of(const Axes& axes) {
  std::vector<AxisSet> all{{"dp_shard", "cp_ring", "cp_ulysses"}};
  if (axes.ring > 1 && axes.ulysses > 1) {
    all.push_back({"dp_shard", "cp_ulysses"});
    all.push_back({"dp_shard", "cp_ring"});
  }
  if (axes.context() > 1) all.push_back({"dp_shard"});
  return all;
}

struct Cell {
  Strategy strategy;
  AxisSet sharded = {"dp_shard", "cp_ring", "cp_ulysses"};
};

// Stages 0, 1 and 3 with shards along all axes and along some. Stage 0 has no shards and reduces over all
// ranks at once, whatever they are: one of them, which take turns.
inline std::vector<Cell> cells_of_stages(const Axes& axes, int turn) {
  const auto shardings = shardings_of(axes);
  std::vector<Cell> cells = {
      {{.flat = {.name = "bucketed"}}, shardings[static_cast<std::size_t>(turn) % shardings.size()]}};
  for (const AxisSet& sharded : shardings) {
    cells.push_back({{.flat = {.name = "zero1", .stage = 1}}, sharded});
    cells.push_back({{.zero3 = true}, sharded});
  }
  return cells;
}

// What one mesh, layout, mean and accumulation is run with: any strategy and axes of shards, which take
// turns. ISOGRAD_FULL_TESTS=1: stages 0, 1 and 3 with all of these axes, and in turn one of the other
// strategies.
inline std::vector<Cell> cells_of(const Axes& axes, int turn) {
  const auto shardings = shardings_of(axes);
  const auto in_turn = [&](const std::vector<Strategy>& strategies) {
    const std::size_t i = static_cast<std::size_t>(turn) % (strategies.size() * shardings.size());
    return Cell{strategies[i % strategies.size()], shardings[i / strategies.size()]};
  };
  if (!full_tests()) return {in_turn(all_strategies())};
  std::vector<Cell> cells = cells_of_stages(axes, turn);
  std::vector<Strategy> others;
  for (const Strategy& strategy : all_strategies())
    if (strategy.checkpoint ||
        (strategy.name() != "bucketed" && strategy.name() != "zero1" && !strategy.zero3))
      others.push_back(strategy);
  cells.push_back(in_turn(others));
  return cells;
}

// E2: ‖g − g64‖ ≤ 4‖g32 − g64‖ + u·√(W·G)·s for each parameter, g32 one rank in the same precision.
struct Rounding {
  double share = 0;   // the largest of what is allowed, over ranks and parameters
  std::string where;  // it was, with its figures
};
inline Rounding rounding_of(const Outcome& outcome, const Reference& wanted,
                            const std::vector<const Outcome*>& alone, at::ScalarType dtype, int reductions) {
  const double unit = std::ldexp(1.0, dtype == at::kFloat ? -24 : -8);
  const double rms = rms_of(wanted);
  Rounding worst;
  for (const auto& [name, g] : wanted.gradients) {
    const auto error = [&](const std::map<std::string, at::Tensor>& of) {
      return (of.at(name).to(at::kDouble) - g).norm().item<double>();
    };
    std::vector<double> of_one;
    for (const Outcome* each : alone) of_one.push_back(error(each->gradients[0]));
    const double allowed =
        4 * *std::max_element(of_one.begin(), of_one.end()) + unit * std::sqrt(reductions) * scale_of(rms, g);
    for (const auto& gradients : outcome.gradients) {
      const double share = error(gradients) / allowed;
      if (share <= worst.share) continue;
      worst = {std::isfinite(share) ? share : HUGE_VAL,
               fmt::format("{} of {} elements: error {:.3g}, of one process {::.3g}, scale {:.3g}", name,
                           g.numel(), error(gradients), of_one, scale_of(rms, g))};
    }
  }
  return worst;
}

struct AveragesOverContext : planted::Wrapped {  // B19
  int ranks;
  AveragesOverContext(std::unique_ptr<DataParallel> inner_, int ranks_)
      : Wrapped(std::move(inner_)), ranks(ranks_) {}
  void finish_reduction() override {
    inner->finish_reduction();
    for (Bucket& bucket : buckets()) bucket.gradients.div_(ranks);
  }
};

inline std::unique_ptr<DataParallel> averages_over_context(std::unique_ptr<DataParallel> right,
                                                           const Mesh& mesh) {
  return std::make_unique<AveragesOverContext>(std::move(right), mesh.size(kContextAxes));
}

template <typename Mean>
struct CountsContextPeers : Mean {  // B5: every context rank counts the whole sample
  double peers;
  explicit CountsContextPeers(double peers_) : peers(peers_) {}
  Denominator denominator(const Census& census) const override {
    Denominator wrong = Mean::denominator(census);
    wrong.value *= peers;
    return wrong;
  }
};

// How all gradients compare with the right ones: the same ratio everywhere, or NaN.
inline double common_ratio(const Outcome& outcome, const Reference& wanted) {
  double common = 0;
  for (const auto& gradients : outcome.gradients)
    for (const auto& [name, g] : wanted.gradients) {
      const double ratio = ((gradients.at(name) * g).sum() / g.square().sum()).item<double>();
      if (common == 0) common = ratio;
      if ((gradients.at(name) - common * g).norm().item<double>() > 1e-9 * g.norm().item<double>())
        return std::nan("");
    }
  return common;
}

}  // namespace isograd::context
