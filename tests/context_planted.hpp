// What tests of whole steps over context ranks share besides: folds, and the museum's mistakes.
#pragma once

#include <cstdlib>

#include "context_step.hpp"

namespace isograd::context {

inline const std::vector<ContextFold> kFolds = {ContextFold::kAll, ContextFold::kUlyssesOnly,
                                                ContextFold::kRingOnly, ContextFold::kNone};

inline bool full_tests() {
  const char* value = std::getenv("ISOGRAD_FULL_TESTS");
  return value && *value && *value != '0';
}

// Folds that make the same groups (an axis of size 1) are one.
inline std::vector<ContextFold> folds_of(const Axes& axes) {
  if (axes.context() == 1) return {ContextFold::kAll};
  if (axes.ring == 1 || axes.ulysses == 1) return {ContextFold::kAll, ContextFold::kNone};
  return kFolds;
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
