// Deferred means: however a step is split into calls, its gradient is the same.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "full_tests.hpp"
#include "toy_means.hpp"

namespace isograd {
namespace {

using toy::Outcome;
using toy::run;

// s of a parameter: max(‖g64‖, 1e-3 · RMS · √numel).
double scale_of(const std::vector<at::Tensor>& gradients, std::size_t which) {
  double squares = 0, count = 0;
  for (const at::Tensor& g : gradients) {
    squares += g.square().sum().item<double>();
    count += static_cast<double>(g.numel());
  }
  return std::max(gradients[which].norm().item<double>(),
                  1e-3 * std::sqrt(squares / count * static_cast<double>(gradients[which].numel())));
}

// E2 allows ‖g − g64‖ ≤ 4 ‖g32 − g64‖ + u √(W G) s: four times what one process rounds, measured, and the
// rounding of a sum of W G parts. Measured it is one draw. Over the elements of a matrix draws average out;
// the draw of a parameter of one element may be near 0 by luck, and then the bound says nothing about
// rounding: of pairs of runs on one process that take the same pieces in other micro-batches, 7 to 17 % break
// it against each other, and none for the other parameters.
//
// Such a parameter's gradient is one sum g = Σ t_k, here over tokens and hidden units, and for a sum the
// rounding is known beforehand. Terms that are each rounded once to t_k (1 + δ_k), |δ_k| ≤ u, and then added
// exactly, give an error of at most u Σ |t_k|, and there are such δ_k for any error below that (Higham,
// Accuracy and Stability of Numerical Algorithms, 2nd ed., §1.6 and §4.2; the condition number of a sum is
// Σ |t_k| / |Σ t_k|, here 14 to 37). No fp32 gradient can be asked for more: its componentwise backward error
// is then at most u. So one process's rounding is the larger of the two, and no factor stands before the
// second: max(4 ‖g32 − g64‖, u Σ |t_k|) + u √(W G) s.
constexpr double kRoundOff = 0x1p-24;  // u

// Σ |t_k| of Model::gain, from terms in fp64: its gradient, were it a parameter of its own for each token and
// hidden unit.
double absolute_terms_of_gain(const toy::Assignment& assigned, Mean mean, bool weighted) {
  const auto divided_by = toy::divisors(assigned, mean, weighted);
  double sum = 0;
  for (std::size_t i = 0; i < assigned.pieces.size(); ++i) {
    if (divided_by[i] == 0) continue;
    toy::Model model;
    const std::int64_t length = assigned.pieces[i].end - assigned.pieces[i].begin;
    model.gain = model.gain.detach()
                     .expand({length, toy::kHidden})
                     .clone(at::MemoryFormat::Contiguous)
                     .requires_grad_();
    const at::Tensor share = toy::piece_sum(model, assigned, assigned.pieces[i], weighted) / divided_by[i];
    sum += torch::autograd::grad({share}, {model.gain})[0].abs().sum().item<double>();
  }
  return sum;
}

// 50 random ways of splitting one batch into calls give one gradient; 200 with ISOGRAD_FULL_TESTS=1.
TEST(Deferred, DoesNotDependOnHowTheStepIsSplitIntoCalls) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
  const auto draw = [&](std::int64_t n) {
    return at::randint(0, n, {1}, generator, at::kLong).item<std::int64_t>();
  };
  const int ways = full_tests() ? 200 : 50;
  constexpr int kRanks = 2;
  constexpr std::size_t kGain = 3;  // of Model::trainable(), one element
  double worst = 0, worst_of_allowed = 0, nudged_of_allowed = HUGE_VAL;
  for (Mean mean : {Mean::kTargets, Mean::kFixed, Mean::kSamples}) {
    const bool weighted = mean == Mean::kFixed;
    std::vector<toy::Sample> samples;
    for (std::uint64_t s = 0; s < 9; ++s)
      samples.push_back(toy::make_sample(2 + static_cast<std::int64_t>(s * 5 % 13), s));
    toy::Reference wanted;
    std::vector<double> alone, scales;  // 4 × one process's rounding; s
    for (int way = 0; way < ways; ++way) {
      // Each sample goes to a call and a micro-batch of it; cut over the two ranks at a random place. Under
      // the token mean and the fixed denominator its two parts may lie in different calls.
      const int calls = 1 + static_cast<int>(draw(5));
      toy::Assignment assigned{.samples = samples, .pieces = {}, .by_rank = {}};
      for (std::int64_t s = 0; s < 9; ++s) {
        const std::int64_t length = samples[static_cast<std::size_t>(s)].tokens.size(0), cut = 4;
        const int first = static_cast<int>(draw(calls)),
                  second = mean == Mean::kSamples ? first : static_cast<int>(draw(calls));
        const auto rank = static_cast<int>(draw(2));
        assigned.pieces.push_back({s, 0, std::min(cut, length), rank, first});
        if (length > cut) assigned.pieces.push_back({s, cut, length, static_cast<int>(draw(2)), second});
      }
      toy::build(assigned, {calls, calls}, weighted);
      if (way == 0) {
        wanted = toy::reference(toy::Model(), assigned, mean, weighted);
        const auto g32 = toy::reference(toy::Model(at::kFloat), assigned, mean, weighted).gradients;
        for (std::size_t p = 0; p < g32.size(); ++p) {
          alone.push_back(4 * (g32[p].to(at::kDouble) - wanted.gradients[p]).norm().item<double>());
          scales.push_back(scale_of(wanted.gradients, p));
        }
        alone[kGain] = std::max(alone[kGain], kRoundOff * absolute_terms_of_gain(assigned, mean, weighted));
      }
      const auto deferred = [&] { return std::make_unique<Deferred>(toy::make_normalizer(mean)); };
      const Outcome outcome = run(assigned, {.mean = deferred, .calls = calls});
      const double error = worst_error(outcome, wanted);
      worst = std::max(worst, error);
      ASSERT_LT(error, 1e-12) << name_of(mean) << ", way " << way << " in " << calls << " calls on " << kRanks
                              << " ranks";
      ASSERT_NEAR(outcome.reports[1].loss, wanted.loss, 1e-12 * std::max(1.0, wanted.loss));
      ASSERT_TRUE(outcome.reports[0].updated);
      const auto allowed = [&](std::size_t p) {
        return alone[p] + kRoundOff * std::sqrt(kRanks * calls) * scales[p];
      };
      const auto error_of = [&](const Outcome& of, std::size_t p) {
        return (of.gradients[0][p] - wanted.gradients[p]).norm().item<double>();
      };
      const Outcome rounded = run(assigned, {.mean = deferred, .calls = calls, .type = at::kFloat});
      for (std::size_t p = 0; p < alone.size(); ++p) {
        ASSERT_LE(error_of(rounded, p), allowed(p))
            << name_of(mean) << ", way " << way << ", parameter " << p;
        if (allowed(p) > 0) worst_of_allowed = std::max(worst_of_allowed, error_of(rounded, p) / allowed(p));
      }
      // Planted: the parameter of one element 1e-5 too large, relatively.
      const Outcome nudged =
          run(assigned, {.mean = deferred, .calls = calls, .type = at::kFloat, .nudged = "gain"});
      ASSERT_GT(error_of(nudged, kGain), allowed(kGain)) << name_of(mean) << ", way " << way;
      nudged_of_allowed = std::min(nudged_of_allowed, error_of(nudged, kGain) / allowed(kGain));
    }
  }
  std::printf(
      "3 x %d ways: largest error %.2e in fp64, %.2f of what is allowed in fp32; 1e-5 too large in one element "
      "is "
      "%.1f times that or more\n",
      ways, worst, worst_of_allowed, nudged_of_allowed);
}

}  // namespace
}  // namespace isograd
