// One process: golden vectors, finite differences, and the twin under every option.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "full_tests.hpp"
#include "isograd/world.hpp"
#include "loss/loss_testing.hpp"
#include "loss/ranking/ranking_testing.hpp"

namespace isograd {
namespace {

using twin::column;
using twin::labels;
using twin::plain;
using twin::plain_as;

void expect_near(const at::Tensor& found, const std::vector<double>& wanted, double allowed) {
  ASSERT_EQ(found.numel(), static_cast<std::int64_t>(wanted.size()));
  for (std::size_t i = 0; i < wanted.size(); ++i)
    EXPECT_NEAR(found.flatten()[static_cast<std::int64_t>(i)].item<double>(), wanted[i], allowed) << i;
}

// Computed from the formulas in fp64 by others; gradients are given to ten digits.
constexpr double kGolden = 1e-9;

TEST(Golden, SmoothAP) {
  struct Vector {
    std::vector<double> scores;
    std::vector<std::int64_t> targets;
    double tau, ap;
    std::vector<double> gradient;
  };
  const std::vector<Vector> vectors = {{{2, -1, 1, -2},
                                        {1, 0, 1, 0},
                                        1,
                                        0.9315861021321803,
                                        {-0.0233295075, 0.0413329725, -0.0351553869, 0.0171519219}},
                                       {{-.5, 1, .5, -1},
                                        {1, 0, 1, 0},
                                        1,
                                        0.6017308305991269,
                                        {-0.0435081696, 0.0497453092, -0.0519950993, 0.0457579597}},
                                       {{1, 1, 0}, {1, 0, 0}, .01, 2. / 3, {-100. / 9, 100. / 9, 0}}};
  for (const auto& v : vectors) {
    SmoothAPLoss loss(plain(v.tau));
    const at::Tensor scores = column(v.scores), value = loss.forward(scores, labels(v.targets));
    EXPECT_NEAR(1 - value.item<double>(), v.ap, kGolden);
    expect_near(gradient_of(value, scores), v.gradient, kGolden);
  }
}

at::Tensor golden_scores() { return column({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 6.5, 8.0}); }
at::Tensor golden_targets() { return labels({0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1}); }

TEST(Golden, RecallAtQuantile) {
  auto options = plain_as<RecallOptions>(.5);
  options.quantile = .25;
  RecallAtQuantileLoss loss(options);
  const at::Tensor scores = golden_scores(), value = loss.forward(scores, golden_targets());
  EXPECT_NEAR(value.item<double>(), 0.7262870634112166, kGolden);
  expect_near(gradient_of(value, scores), {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, -0.0451766597, -0.25}, kGolden);
}

TEST(Golden, PartialAUC) {
  auto options = plain_as<PAUCOptions>(.5);
  options.alpha = .1, options.beta = .5;
  const at::Tensor scores = golden_scores();
  {
    const RankingResult result = PAUCAtBudgetLoss(options).evaluate(scores, golden_targets());
    EXPECT_NEAR(result.loss.item<double>(), 0.4757515042518773, kGolden);
    expect_near(gradient_of(result.loss, scores).narrow(0, 10, 2), {-0.0488749726, -0.0480187705}, kGolden);
    EXPECT_EQ(result.diagnostics.t_alpha.item<double>(), 9);
    EXPECT_EQ(result.diagnostics.t_beta.item<double>(), 5);
    EXPECT_EQ(result.diagnostics.tau_eff.item<double>(), 2);
    EXPECT_EQ(result.diagnostics.band_neg_count.item<std::int64_t>(), 5);
    EXPECT_EQ(result.diagnostics.grad_pos_count.item<std::int64_t>(), 2);
  }
  options.n_knots = 5;
  EXPECT_NEAR(PAUCAtBudgetLoss(options).forward(scores, golden_targets()).item<double>(), 0.47214547473091106,
              kGolden);
  options.surrogate = PAUCOptions::Surrogate::kPairwise;
  PAUCAtBudgetLoss pairwise(options);
  const at::Tensor value = pairwise.forward(scores, golden_targets());
  EXPECT_NEAR(value.item<double>(), 0.4728666806351043, kGolden);
  expect_near(gradient_of(value, scores),
              {0, 0, 0, 0, 0, 0.0183520723, 0.0221373008, 0.0240568897, 0.0233947497, 0.0204054250,
               -0.0550581470, -0.0532882905},
              kGolden);
}

TEST(Golden, PartialAUCByBasis) {
  auto options = plain_as<PAUCOptions>(.5);
  options.alpha = .1, options.beta = .5;
  const at::Tensor scores = column({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 20, 21, 22});
  const at::Tensor targets = labels({0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1});
  auto found = PAUCAtBudgetLoss(options).evaluate(scores, targets).diagnostics;
  EXPECT_EQ(found.t_alpha.item<double>(), 9);
  EXPECT_EQ(found.t_beta.item<double>(), 5);
  EXPECT_EQ(found.band_neg_count.item<std::int64_t>(), 5);
  options.budget_basis = PAUCOptions::Basis::kPopulation;
  found = PAUCAtBudgetLoss(options).evaluate(scores, targets).diagnostics;
  EXPECT_EQ(found.t_alpha.item<double>(), 21);
  EXPECT_EQ(found.t_beta.item<double>(), 6);
}

TEST(Golden, Warmup) {
  auto main = std::make_shared<SmoothAPLoss>(plain(1));
  LossWarmup loss([](const auto& s, const auto&, const auto&) { return s.sum(); }, main,
                  {.temp_start = .1, .temp_end = .01, .temp_decay_steps = 100});
  const std::vector<std::pair<int, double>> wanted = {
      {0, .1}, {25, .0562341325}, {50, .0316227766}, {100, .01}, {500, .01}};
  for (const auto& [step, temperature] : wanted) {
    loss.on_train_batch_start(step);
    EXPECT_NEAR(main->temperature(), temperature, kGolden) << step;
  }
}

// Every loss × reduction × option at a random pool with a filled queue, weights and flags. SmoothAP: central
// differences. Recall and PAUC: their thresholds are constants to the gradient but move with the scores,
// which differences would see; so the twin, whose thresholds are detached, under autograd. Differences of
// these follow below, where thresholds stand still.
template <typename Loss, typename Options>
void check_differences(const Options& given, const std::string& text, bool thresholds) {
  for (const std::int64_t classes : {1, 3})
    for (const LossReduction reduction : {LossReduction::kMean, LossReduction::kSum, LossReduction::kNone})
      for (const bool weighted : {false, true}) {
        Options options = given;
        options.num_classes = classes, options.reduction = reduction, options.queue_size = 9;
        at::manual_seed(11);
        const std::int64_t n = 14;
        const at::Tensor scores = leaf(at::randn({n, classes}, at::kDouble));
        at::Tensor targets = at::randint(classes == 1 ? 2 : classes, {n}, at::kLong);
        targets[3] = -100;
        RankingExtras extras;
        if (weighted) extras = {at::rand({n}).lt(0.7), at::rand({n}, at::kDouble)};
        Loss loss(options);
        loss.forward(at::randn({9, classes}, at::kDouble),
                     at::randint(2, {9}, at::kLong));  // fills the queue
        loss.eval();
        const auto value = [&](const at::Tensor& at) {
          const at::Tensor result = loss.forward(at, targets, extras);
          return at::where(at::isnan(result), at::zeros_like(result), result).sum();
        };
        const at::Tensor found = gradient_of(value(scores), scores);
        ASSERT_GT(found.norm().item<double>(), 1e-4) << text;
        if (!thresholds) {
          EXPECT_LT(off_from_differences(value, scores, found), 1e-7) << text;
          continue;
        }
        // A stop-gradient threshold: the twin under autograd says the same, and its formulas differ.
        const auto state = loss.state();
        const auto buffer = [&](const std::string& name) {
          return std::find_if(state.begin(), state.end(), [&](const auto& e) { return e.first == name; })
              ->second;
        };
        const at::Tensor kept = targets.ne(-100).nonzero().squeeze(1), own = leaf(scores);
        const at::Tensor ones = at::ones({n}, at::kDouble);
        const auto join = [&](const at::Tensor& live, const char* name) {
          return at::cat({live.index_select(0, kept), buffer(name)});
        };
        twin::Pool pool{join(own, "queue_scores"), join(targets, "queue_labels"),
                        join(weighted ? extras.iid_mask : ones.to(at::kBool), "queue_iid"), at::Tensor(),
                        join(weighted ? extras.sample_weight : ones, "queue_weights")};
        pool.live = at::arange(pool.targets.numel()).lt(kept.numel());
        const at::Tensor twin =
            twin::loss(pool, classes, reduction, [&](const auto& p, const auto& s, const auto& positive) {
              if constexpr (std::is_same_v<Options, RecallOptions>)
                return twin::recall(p, s, positive, options.temperature, options);
              else if constexpr (std::is_same_v<Options, PAUCOptions>)
                return twin::pauc(p, s, positive, options.temperature, options);
              else
                return twin::smooth_ap(p, s, positive, options.temperature);
            });
        const double mine = value(scores).template item<double>();
        EXPECT_NEAR(mine, twin.template item<double>(), 1e-12) << text;
        EXPECT_LT(relative(found, gradient_of(twin, own)), 1e-12) << text;
      }
}

TEST(Differences, OfSmoothAP) {
  for (const double tau : {0.1, 1.0}) {
    check_differences<SmoothAPLoss>(plain(tau), fmt::format("tau {}", tau), false);
    check_differences<SmoothAPLoss>(plain(tau), fmt::format("twin, tau {}", tau), true);
  }
}

TEST(Differences, OfRecallInEveryMode) {
  for (int mode = 0; mode < 5; ++mode)
    for (const double q : {0.1, 0.35}) {
      auto options = plain_as<RecallOptions>(0.5);
      options.quantile = q, options.interpolation = static_cast<Interpolation>(mode);
      check_differences<RecallAtQuantileLoss>(options, fmt::format("mode {} q {}", mode, q), true);
    }
}

// Every combination of options, with its name.
template <typename Check>
void for_each_pauc(const Check& check) {
  for (int bits = 0; bits < 16; ++bits)
    for (const std::int64_t knots : {2, 5})
      for (int mode = 0; mode < 5; ++mode) {
        auto options = plain_as<PAUCOptions>(0.6);
        options.alpha = 0.05, options.beta = 0.7, options.n_knots = knots;
        options.surrogate = static_cast<PAUCOptions::Surrogate>(bits & 1);
        options.tau_scale = static_cast<PAUCOptions::Scale>(bits >> 1 & 1);
        options.pos_numerator = static_cast<PAUCOptions::Numerator>(bits >> 2 & 1);
        options.budget_basis = static_cast<PAUCOptions::Basis>(bits >> 3 & 1);
        options.interpolation = static_cast<Interpolation>(mode);
        check(options, fmt::format("options {} knots {} mode {}", bits, knots, mode));
      }
}

TEST(Differences, OfPartialAUCUnderEveryOption) {
  for_each_pauc([](const PAUCOptions& options, const std::string& name) {
    check_differences<PAUCAtBudgetLoss>(options, name, true);
  });
}

// Central differences proper, where thresholds stand still: their order statistics are rows of the queue,
// which differences do not move. Of PAUC by the flags (no row of the step is iid), of recall by the scores
// (the step's rows lie above or below all of the queue's). Classes, reductions and weights by turns;
// ISOGRAD_FULL_TESTS=1: all.
template <typename Loss, typename Options>
void check_still_thresholds(const Options& given, const std::string& text, std::size_t& turn) {
  constexpr std::int64_t kLive = 9, kQueue = 30;
  for (const std::int64_t classes : {1, 3})
    for (const LossReduction reduction : {LossReduction::kMean, LossReduction::kSum, LossReduction::kNone})
      for (const bool weighted : {false, true}) {
        if (!full_tests() && turn++ % 5 != 0) continue;  // no divisor of the 12
        Options options = given;
        options.num_classes = classes, options.reduction = reduction, options.queue_size = kQueue;
        Loss loss(options);
        at::manual_seed(3);
        loss.forward(at::rand({kQueue, classes}, at::kDouble) * 4 - 2,
                     at::randint(classes == 1 ? 2 : classes, {kQueue}, at::kLong));
        loss.eval();
        at::Tensor start = at::randn({kLive, classes}, at::kDouble);
        if (std::is_same_v<Options, RecallOptions>) start = start.sign() * (2.2 + start.abs());
        const at::Tensor scores = leaf(start), targets = at::arange(kLive) % (classes == 1 ? 2 : classes);
        RankingExtras extras{.iid_mask = at::zeros({kLive}, at::kBool)};
        if (weighted) extras.sample_weight = at::rand({kLive}, at::kDouble);
        const auto value = [&](const at::Tensor& at) {
          const at::Tensor result = loss.forward(at, targets, extras);
          return at::where(at::isnan(result), at::zeros_like(result), result).sum();
        };
        const at::Tensor found = gradient_of(value(scores), scores);
        ASSERT_GT(found.norm().item<double>(), 1e-4) << text;
        EXPECT_LT(off_from_differences(value, scores, found), 1e-7) << text;
      }
}

TEST(Differences, OfRecallWithStillThresholds) {
  std::size_t turn = 0;
  for (int mode = 0; mode < 5; ++mode)
    for (const double q : {0.4, 0.55}) {
      auto options = plain_as<RecallOptions>(1.5);
      options.quantile = q, options.interpolation = static_cast<Interpolation>(mode);
      check_still_thresholds<RecallAtQuantileLoss>(options, fmt::format("mode {} q {}", mode, q), turn);
    }
}

TEST(Differences, OfPartialAUCWithStillThresholds) {
  std::size_t turn = 0;
  for_each_pauc([&turn](const PAUCOptions& options, const std::string& name) {
    check_still_thresholds<PAUCAtBudgetLoss>(options, name, turn);
  });
}

}  // namespace
}  // namespace isograd
