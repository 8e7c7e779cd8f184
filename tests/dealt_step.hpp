// One step of the toy model on dealt samples, on ranks as threads.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "isograd/step.hpp"
#include "isograd/world.hpp"
#include "planted.hpp"
#include "toy_means.hpp"

namespace isograd::toy {

using MakeMean = std::function<std::unique_ptr<Normalizer>()>;

struct Outcome {
  std::vector<std::vector<at::Tensor>> gradients;  // per rank
  std::vector<StepReport> reports;
};

struct Setting {
  MakeMean mean;
  bool averages = false;  // gradients averaged over the ranks
  int calls = 1;          // accumulate() is called with this many parts of the micro-batches
  at::ScalarType type = at::kDouble;
  // Whether every step asserts that the ranks divide by the same numbers; as the build says unless given.
  std::optional<bool> checked{};
  std::string nudged{};  // this parameter's reduced gradient is 1 + 1e-5 times what it should be
};

struct Nudges : planted::Wrapped {
  std::string name;
  Nudges(std::unique_ptr<DataParallel> inner_, std::string name_)
      : Wrapped(std::move(inner_)), name(std::move(name_)) {}
  void finish_reduction() override {
    inner->finish_reduction();
    for (auto& view : views())
      if (view.name == name) view.gradient.mul_(1 + 1e-5);
  }
};

inline Outcome run(const Dealt& dealt, const Setting& setting) {
  const int size = static_cast<int>(dealt.by_rank.size());
  Outcome outcome;
  outcome.gradients.resize(static_cast<std::size_t>(size));
  outcome.reports.resize(static_cast<std::size_t>(size));
  run_ranks(size, [&](World& world) {
    Model model(setting.type);
    std::unique_ptr<DataParallel> layout =
        bucketed(trainable_parameters(model.named()), world.group, {.bucket_bytes = 256});
    if (setting.averages) layout = std::make_unique<planted::Averages>(std::move(layout));
    if (!setting.nudged.empty()) layout = std::make_unique<Nudges>(std::move(layout), setting.nudged);
    const auto mean = setting.mean();
    const auto optimizer = sgd({.learning_rate = 0});
    Step step(
        [&](const Batch& batch) -> LossTerms {
          return {{"cross_entropy",
                   weighted_sum(token_losses(model.logits(batch), batch.targets), batch.weights)}};
        },
        *layout, *mean, *optimizer, {.check_denominators = setting.checked.value_or(debug_build())});
    const auto rank = static_cast<std::size_t>(world.rank);
    const MicroBatches& own = dealt.by_rank[rank];
    for (int call = 0; call < setting.calls; ++call) {
      const auto cut = [&](int i) {
        return own.begin() + static_cast<std::ptrdiff_t>(own.size() * static_cast<std::size_t>(i) /
                                                         static_cast<std::size_t>(setting.calls));
      };
      step.accumulate({cut(call), cut(call + 1)});
    }
    outcome.reports[rank] = step.finish();
    for (auto& view : layout->views())
      outcome.gradients[rank].push_back(view.gradient.to(at::kDouble) * outcome.reports[rank].gradient_scale);
  });
  return outcome;
}

inline double worst_error(const Outcome& outcome, const Reference& wanted) {
  double worst = 0;
  for (auto& gradients : outcome.gradients) worst = std::max(worst, worst_error(gradients, wanted.gradients));
  return worst;
}

}  // namespace isograd::toy
