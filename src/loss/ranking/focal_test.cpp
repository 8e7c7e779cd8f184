// Focal losses: finite differences, and any number of ranks against one process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "isograd/ranking.hpp"
#include "isograd/world.hpp"
#include "loss/loss_testing.hpp"

namespace isograd {
namespace {

using ::testing::HasSubstr;

const LossReduction kAll[] = {LossReduction::kMean, LossReduction::kSum, LossReduction::kNone};

TEST(FocalDifferences, OfSigmoidUnderEveryOption) {
  at::manual_seed(1);
  const at::Tensor x = leaf(at::randn({4, 3}, at::kDouble) * 2);
  for (const bool soft : {false, true})
    for (const double alpha : {-1.0, 0.25, 0.9})
      for (const double gamma : {0.0, 0.5, 1.0, 2.0})
        for (const LossReduction reduction : kAll)
          for (const bool weighted : {false, true}) {
            const at::Tensor y = soft ? at::rand({4, 3}, at::kDouble) : at::randint(2, {4, 3}, at::kDouble);
            const at::Tensor w = weighted ? at::rand({4, 1}, at::kDouble) : at::Tensor();
            SigmoidFocalLoss loss({.alpha = alpha, .gamma = gamma, .reduction = reduction});
            const auto value = [&](const at::Tensor& at) { return loss.forward(at, y, w).sum(); };
            EXPECT_LT(off_from_differences(value, x, gradient_of(value(x), x)), 1e-7)
                << soft << alpha << " " << gamma;
          }
}

TEST(FocalDifferences, OfSoftmaxUnderEveryOption) {
  at::manual_seed(2);
  const at::Tensor x = leaf(at::randn({3, 4, 2}, at::kDouble) * 2);
  at::Tensor y = at::randint(4, {3, 2}, at::kLong);
  y[1][0] = -100;
  for (const double smoothing : {0.0, 0.2})
    for (const bool alpha : {false, true})
      for (const double gamma : {0.0, 0.5, 1.0, 2.0})
        for (const LossReduction reduction :
             {LossReduction::kMean, LossReduction::kSum, LossReduction::kNone, LossReduction::kMeanPositive})
          for (const bool weighted : {false, true}) {
            const at::Tensor w = weighted ? at::rand({3, 2}, at::kDouble) : at::Tensor();
            SoftmaxFocalLoss loss(
                {.alpha = alpha ? std::vector<double>{0.5, 1, 2, 0.1} : std::vector<double>{},
                 .gamma = gamma,
                 .reduction = reduction,
                 .label_smoothing = smoothing});
            const auto value = [&](const at::Tensor& at) { return loss.forward(at, y, w).sum(); };
            EXPECT_LT(off_from_differences(value, x, gradient_of(value(x), x)), 1e-7);
          }
}

TEST(Focal, StaysFiniteWhereTheProbabilityIsSaturated) {
  const at::Tensor x = leaf(at::tensor({1e4f, -1e4f, 200.f})), y = at::tensor({1.f, 0.f, 1.f});
  const at::Tensor value = SigmoidFocalLoss({.gamma = 0.5}).forward(x, y);
  EXPECT_TRUE(at::isfinite(gradient_of(value, x)).all().item<bool>());
  const at::Tensor s = leaf(at::tensor({1e4f, -1e4f, 0.f}).view({1, 3}));
  const at::Tensor of_softmax = SoftmaxFocalLoss({.gamma = 0.5}).forward(s, at::zeros({1}, at::kLong));
  EXPECT_TRUE(at::isfinite(gradient_of(of_softmax, s)).all().item<bool>());
}

// A score that is not finite is no bad input but a diverged model: NaN, on every rank, though the loss of a
// certain and right infinity would be 0.
TEST(Focal, IsNaNWhereAScoreIsNotFinite) {
  run_ranks(3, [](World& world) {
    for (const double bad : {static_cast<double>(NAN), HUGE_VAL, -HUGE_VAL})
      for (const LossReduction reduction : {LossReduction::kMean, LossReduction::kSum}) {
        at::Tensor x = at::zeros({2, 3}, at::kDouble), ones = at::ones({2, 3}, at::kDouble);
        if (world.rank == 1) x[1][2] = bad;
        const at::Tensor y = at::full({2}, 2, at::kLong);
        EXPECT_TRUE(std::isnan(
            SigmoidFocalLoss({.reduction = reduction}, world.group).forward(x, ones).item<double>()));
        EXPECT_TRUE(
            std::isnan(SoftmaxFocalLoss({.reduction = reduction}, world.group).forward(x, y).item<double>()));
      }
  });
}

// Against the formula as it is usually written, (1 − exp(log p))^γ, in the same type: its rounding is the
// measure. γ multiplies what 1 − p_y and its derivative are off.
TEST(Focal, OfALargeExponentIsAsExactAsThePlainFormula) {
  constexpr std::uint64_t kSeed = 11;
  at::manual_seed(kSeed);
  const auto plain = [](const at::Tensor& x, const at::Tensor& y, double gamma) {
    const at::Tensor log_p = at::log_softmax(x, 1).gather(1, y.unsqueeze(1)).squeeze(1);
    return ((1 - log_p.exp()).pow(gamma) * -log_p).sum();
  };
  for (const double gamma : {2.0, 5.0, 10.0})
    for (const double spread : {1.0, 3.0, 10.0}) {
      const at::Tensor x = at::randn({2000, 5}) * spread, y = at::randint(5, {2000}, at::kLong);
      SoftmaxFocalLoss loss({.gamma = gamma, .reduction = LossReduction::kSum});
      const at::Tensor in_double = leaf(x.to(at::kDouble)), ours = leaf(x), theirs = leaf(x);
      const at::Tensor exact = gradient_of(loss.forward(in_double, y), in_double);
      EXPECT_LT(relative(gradient_of(plain(in_double, y, gamma), in_double), exact), 1e-12);
      const double own = relative(gradient_of(loss.forward(ours, y), ours), exact);
      const double peer = relative(gradient_of(plain(theirs, y, gamma), theirs), exact);
      EXPECT_LT(own, 1.5 * peer) << "gamma " << gamma << ", spread " << spread << ", seed " << kSeed;
    }
}

TEST(Focal, IgnoredPositionsMayHoldAnything) {
  const at::Tensor x = leaf(at::tensor({1., 2., NAN, NAN}, at::kDouble).view({2, 2}));
  const at::Tensor y = at::tensor({1, -100}, at::kLong);
  const at::Tensor value = SoftmaxFocalLoss().forward(x, y);
  EXPECT_TRUE(std::isfinite(value.item<double>()));
  EXPECT_TRUE(at::isfinite(gradient_of(value, x)).all().item<bool>());
  const at::Tensor nothing = SoftmaxFocalLoss().forward(x, at::full({2}, -100, at::kLong));
  EXPECT_EQ(nothing.item<double>(), 0);
  EXPECT_EQ(gradient_of(nothing, x).abs().sum().item<double>(), 0);
  EXPECT_EQ(SigmoidFocalLoss().forward(at::zeros({0, 2}), at::zeros({0, 2})).item<double>(), 0);
}

class FocalAt : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, FocalAt, ::testing::Values(1, 2, 3, 4, 5, 8));

TEST_P(FocalAt, IsOneProcesssUnderASumAndUnderAnAverageIfToldSo) {
  const int ranks = GetParam();
  const std::vector<std::int64_t> all_rows = {5, 3, 0, 6, 1, 0, 4, 2};
  const std::vector<std::int64_t> rows(all_rows.begin(), all_rows.begin() + ranks);
  const std::int64_t n = std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
  at::manual_seed(3);
  const at::Tensor x = at::randn({n, 3}, at::kDouble), weights = at::rand({n}, at::kDouble);
  const at::Tensor w = at::randn({3, 4}, at::kDouble), soft = at::rand({n, 4}, at::kDouble);
  at::Tensor y = at::randint(4, {n}, at::kLong);
  y[0] = -100;
  run_ranks(ranks, [&](World& world) {
    const auto begin = std::accumulate(rows.begin(), rows.begin() + world.rank, std::int64_t{0});
    const std::int64_t own = rows[static_cast<std::size_t>(world.rank)];
    for (const bool softmax : {false, true})
      for (const LossReduction reduction :
           {LossReduction::kMean, LossReduction::kSum, LossReduction::kMeanPositive})
        for (const bool weighted : {false, true})
          for (const GradReduction grad : {GradReduction::kSum, GradReduction::kMean}) {
            if (!softmax && reduction == LossReduction::kMeanPositive) continue;
            const at::Tensor of_elements = weighted ? weights : at::Tensor();
            // The whole by plain formulas.
            const at::Tensor parameter = leaf(w), z = x.matmul(parameter);
            at::Tensor each, counted;
            if (softmax) {
              const at::Tensor valid = y.ne(-100).to(at::kDouble), label = y.clamp_min(0);
              const at::Tensor ce = at::cross_entropy_loss(z, label, {}, at::Reduction::None);
              const at::Tensor p = at::softmax(z, 1).gather(1, label.unsqueeze(1)).squeeze(1);
              each = (1 - p).square() * ce * valid;
              counted = reduction == LossReduction::kMeanPositive ? valid * y.ne(0).to(at::kDouble) : valid;
            } else {
              const at::Tensor p = at::sigmoid(z), pt = p * soft + (1 - p) * (1 - soft);
              each = (0.25 * soft + 0.75 * (1 - soft)) * (1 - pt).square() *
                     at::binary_cross_entropy_with_logits(z, soft, {}, {}, at::Reduction::None);
              counted = at::ones_like(z);
            }
            if (weighted) {
              const at::Tensor by = softmax ? weights : weights.unsqueeze(1);
              each = each * by, counted = counted * by;
            }
            const at::Tensor whole =
                reduction == LossReduction::kSum ? each.sum() : each.sum() / counted.sum();
            const at::Tensor wanted = gradient_of(whole, parameter);

            const at::Tensor mine = leaf(w), scores = x.narrow(0, begin, own).matmul(mine);
            const at::Tensor own_weights = weighted ? of_elements.narrow(0, begin, own) : at::Tensor();
            const Traffic before = world.group.traffic();
            const at::Tensor value =
                softmax ? SoftmaxFocalLoss({.reduction = reduction, .grad_reduction = grad}, world.group)
                              .forward(scores, y.narrow(0, begin, own), own_weights)
                        : SigmoidFocalLoss({.reduction = reduction, .grad_reduction = grad}, world.group)
                              .forward(scores, soft.narrow(0, begin, own),
                                       weighted ? own_weights.unsqueeze(1) : own_weights);
            at::Tensor sum = gradient_of(value, mine).clone();
            // One collective of five numbers a rank, whatever the rows.
            EXPECT_EQ(world.group.traffic().bytes() - before.bytes(), 40 * (ranks - 1));
            world.group.all_reduce(sum);
            EXPECT_NEAR(value.item<double>(), whole.item<double>(),
                        1e-12 * std::abs(whole.item<double>()) + 1e-15);
            const at::Tensor as_trained = grad == GradReduction::kMean ? sum / ranks : sum;
            ASSERT_LT(relative(as_trained, wanted), 1e-10) << softmax << weighted;
            if (ranks > 1) {  // planted fault B24: the other reduction
              const double factor = grad == GradReduction::kMean ? ranks : 1.0 / ranks;
              const at::Tensor wrong = grad == GradReduction::kMean ? sum : sum / ranks;
              EXPECT_NEAR((wrong * wanted).sum().item<double>() / wanted.square().sum().item<double>(),
                          factor, 1e-9);
            }
          }
  });
}

TEST(Focal, NamesBadInput) {
  EXPECT_THAT(error_of([] { SigmoidFocalLoss made({.alpha = 1.5}); }), HasSubstr("alpha"));
  EXPECT_THAT(error_of([] { SigmoidFocalLoss made({.gamma = -1}); }), HasSubstr("gamma"));
  EXPECT_THAT(error_of([] { SigmoidFocalLoss made({.reduction = LossReduction::kMeanPositive}); }),
              HasSubstr("mean_positive"));
  EXPECT_THAT(error_of([] { SoftmaxFocalLoss made({.label_smoothing = 1}); }), HasSubstr("label_smoothing"));
  EXPECT_THAT(error_of([] { SoftmaxFocalLoss made({.gamma = NAN}); }), HasSubstr("gamma"));
  const at::Tensor x = at::zeros({2, 3}), y = at::zeros({2}, at::kLong);
  SoftmaxFocalLoss wrong_alpha({.alpha = {1, 2}}), softmax;
  SigmoidFocalLoss sigmoid;
  EXPECT_THAT(error_of([&] { wrong_alpha.forward(x, y); }), HasSubstr("alpha of 2 classes"));
  EXPECT_THAT(error_of([&] { softmax.forward(x, y + 3); }), HasSubstr("0 to 2"));
  EXPECT_THAT(error_of([&] { softmax.forward(x, at::zeros({3}, at::kLong)); }), HasSubstr("targets [3]"));
  EXPECT_THAT(error_of([&] { sigmoid.forward(x, x + 2); }), HasSubstr("outside [0, 1]"));
  EXPECT_THAT(error_of([&] { sigmoid.forward(x, x, at::ones({2})); }), HasSubstr("sample_weight [2]"));
  EXPECT_THAT(error_of([&] { softmax.forward(x, y, at::tensor({1., -1.})); }), HasSubstr("negative"));
  run_ranks(2, [](World& world) {
    SoftmaxFocalLoss loss({}, world.group);
    const at::Tensor scores = at::zeros({2, 3}), targets = at::zeros({2}, at::kLong);
    const bool odd = world.rank == 1;
    EXPECT_THAT(error_of([&] { loss.forward(scores, odd ? targets + 3 : targets); }),
                HasSubstr(odd ? "out of range" : "rank 1 refused"));
    EXPECT_THAT(error_of([&] { loss.forward(scores, targets, odd ? at::ones({2}) : at::Tensor()); }),
                HasSubstr("on some ranks only"));
    EXPECT_THAT(error_of([&] { loss.forward(odd ? scores.to(at::kDouble) : scores, targets); }),
                HasSubstr("other options or another type"));
  });
}

}  // namespace
}  // namespace isograd
