#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "isograd/loss.hpp"
#include "loss/loss_testing.hpp"

namespace isograd {
namespace {

using ::testing::HasSubstr;

struct PolicyProblem {
  at::Tensor log_p, old, advantages, weights;
};

PolicyProblem problem(std::int64_t tokens, at::ScalarType type = at::kDouble) {
  at::manual_seed(11);
  const at::Tensor old = -at::rand({tokens}, at::kDouble) * 3;
  return {.log_p = leaf((old + at::randn({tokens}, at::kDouble) * 0.4).to(type)),
          .old = old.to(type),
          .advantages = at::randn({tokens}, at::kDouble).to(type),
          .weights = some_weights(tokens)};
}

// The paper's formula as it stands there: a minimum of two products, in fp64.
at::Tensor plain_ppo(const at::Tensor& log_p, const PolicyProblem& p, double low, double high) {
  const at::Tensor ratio = (log_p - p.old.to(at::kDouble)).exp(), a = p.advantages.to(at::kDouble);
  return -(at::minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a) * p.weights).sum();
}

TEST(PolicyGradient, EqualsItsTwins) {
  // fp32: the ratio's exponent of size 3 is rounded once, six roundings more; bf16 rounds the gradient once.
  for (const auto& [type, bound, gradient_bound] : {std::tuple{at::kDouble, 1e-14, 1e-14},
                                                    {at::kFloat, 10 * 0x1p-24, 10 * 0x1p-24},
                                                    {at::kBFloat16, 10 * 0x1p-24, 0x1p-8}}) {
    const PolicyProblem p = problem(200, type);
    const at::Tensor twin = leaf(p.log_p.to(at::kDouble));
    const at::Tensor old = p.old.to(at::kDouble), advantages = p.advantages.to(at::kDouble);
    const auto compare = [&](const at::Tensor& found, const at::Tensor& wanted) {
      EXPECT_EQ(found.scalar_type(), type == at::kDouble ? at::kDouble : at::kFloat);
      // Terms of both signs: relative to the size of the terms, some 100.
      EXPECT_NEAR(found.item<double>(), wanted.item<double>(), bound * 500);
      EXPECT_LT(relative(gradient_of(found, p.log_p), gradient_of(wanted, twin)), gradient_bound);
    };
    compare(policy_gradient(p.log_p, p.advantages, {.weights = p.weights}).sum,
            -(twin * advantages * p.weights).sum());
    compare(
        policy_gradient(p.log_p, p.advantages, {.weights = p.weights, .old_log_probabilities = p.old}).sum,
        -((twin - old).exp() * advantages * p.weights).sum());
    const PolicyGradientOptions clip{
        .weights = p.weights, .old_log_probabilities = p.old, .clip_low = 0.2, .clip_high = 0.3};
    compare(policy_gradient(p.log_p, p.advantages, clip).sum, plain_ppo(twin, p, 0.2, 0.3));
    // Planted: a clip that does not look at the sign of the advantage.
    const at::Tensor wrong = -((twin - old).exp().clamp(0.8, 1.3) * advantages * p.weights).sum();
    EXPECT_GT(relative(gradient_of(policy_gradient(p.log_p, p.advantages, clip).sum, p.log_p),
                       gradient_of(wrong, twin)),
              0.05);
  }
}

TEST(PolicyGradient, HasTheGradientOfFiniteDifferences) {
  const PolicyProblem p = problem(30);
  for (const PolicyGradientOptions& options : std::vector<PolicyGradientOptions>{
           {.weights = p.weights},
           {.old_log_probabilities = p.old},
           {.weights = p.weights, .old_log_probabilities = p.old, .clip_low = 0.2, .clip_high = 0.2}}) {
    const auto loss = [&](const at::Tensor& x) { return policy_gradient(x, p.advantages, options).sum; };
    const at::Tensor gradient = gradient_of(loss(p.log_p), p.log_p);
    EXPECT_LT(off_from_differences(loss, p.log_p, gradient), 1e-8);
    EXPECT_GT(off_from_differences(loss, p.log_p, gradient * 1.01), 1e-3);
  }
  const auto kl = [&](const at::Tensor& x) { return reference_kl_sum(x, p.old, p.weights); };
  EXPECT_LT(off_from_differences(kl, p.log_p, gradient_of(kl(p.log_p), p.log_p)), 1e-8);
}

// Ratios 2, 2, 1/2, 1/2 and 1 with advantages 1, -1, 1, -1 and 3: the clip to [0.8, 1.2] binds for the first
// and the fourth.
TEST(PolicyGradient, ByHand) {
  const at::Tensor log_p = leaf(at::tensor({2.0, 2.0, 0.5, 0.5, 1.0}, at::kDouble).log());
  const at::Tensor advantages = at::tensor({1.0, -1.0, 1.0, -1.0, 3.0}, at::kDouble);
  const PolicyLoss loss = policy_gradient(
      log_p, advantages,
      {.old_log_probabilities = at::zeros({5}, at::kDouble), .clip_low = 0.2, .clip_high = 0.2});
  EXPECT_NEAR(loss.sum.item<double>(), -(1.2 - 2 + 0.5 - 0.8 + 3), 1e-15);
  EXPECT_EQ(loss.clipped.item<double>(), 2);
  const double log2 = std::log(2.0);
  EXPECT_NEAR(loss.approximate_kl.item<double>(), 2 * (1 - log2) + 2 * (-0.5 + log2), 1e-15);
  EXPECT_FALSE(loss.clipped.requires_grad() || loss.approximate_kl.requires_grad());
  const at::Tensor gradient = gradient_of(loss.sum, log_p);
  EXPECT_LT((gradient - at::tensor({0.0, 2.0, -0.5, 0.0, -3.0}, at::kDouble)).abs().max().item<double>(),
            1e-15);
}

// On the sampling policy itself (ratio 1) all three have one gradient, and nothing is clipped.
TEST(PolicyGradient, AgreesWithReinforceOnTheSamplingPolicy) {
  const PolicyProblem p = problem(50);
  const at::Tensor on_policy = leaf(p.old);
  const at::Tensor wanted = gradient_of(policy_gradient(on_policy, p.advantages).sum, on_policy);
  const PolicyLoss clipped = policy_gradient(on_policy, p.advantages,
                                             {.old_log_probabilities = p.old, .clip_low = 0, .clip_high = 0});
  EXPECT_LT(relative(gradient_of(clipped.sum, on_policy), wanted), 1e-15);
  EXPECT_EQ(clipped.clipped.item<double>(), 0);
  EXPECT_EQ(clipped.approximate_kl.item<double>(), 0);
}

TEST(PolicyGradient, LeavesOutWhatIsInvalidAndShowsWhatIsNot) {
  const double nan = std::nan("");
  for (auto type : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const at::Tensor log_p = leaf(at::tensor({-1.0, nan, 400.0, -1.0}, at::kDouble).to(type)),
                     old = at::tensor({-1.0, -1.0, -400.0, nan}, at::kDouble).to(type),
                     advantages = at::tensor({1.0, nan, 2.0, nan}, at::kDouble).to(type),
                     mask = at::tensor({1, 0, 1, 0}, at::kLong).to(at::kBool);
    // The third ratio overflows; its clip binds, so its gradient is 0 and not 0 · inf.
    const PolicyLoss loss =
        policy_gradient(log_p, advantages,
                        {.weights = mask, .old_log_probabilities = old, .clip_low = 0.2, .clip_high = 0.2});
    EXPECT_NEAR(loss.sum.item<double>(), -(1 + 2.4), 1e-6);
    EXPECT_EQ(loss.clipped.item<double>(), 1);
    const at::Tensor gradient = gradient_of(loss.sum, log_p).to(at::kDouble);
    EXPECT_TRUE(at::equal(gradient, at::tensor({-1.0, 0.0, 0.0, 0.0}, at::kDouble))) << gradient;
    EXPECT_TRUE(
        std::isnan(policy_gradient(log_p, advantages, {.old_log_probabilities = old}).sum.item<double>()));
    const at::Tensor kl = reference_kl_sum(log_p, old, at::tensor({1, 0, 0, 0}, at::kLong).to(at::kBool));
    EXPECT_EQ(kl.item<double>(), 0);
    EXPECT_EQ(gradient_of(kl, log_p).to(at::kDouble).abs().sum().item<double>(), 0);
    const at::Tensor empty = leaf(at::zeros({0}).to(type));
    const at::Tensor nothing = policy_gradient(empty, empty.detach(), {.old_log_probabilities = empty}).sum;
    EXPECT_EQ(nothing.item<double>(), 0);
    EXPECT_EQ(gradient_of(nothing, empty).numel(), 0);
  }
}

TEST(PolicyGradient, TakesGradientsOfNothingButTheLogProbabilities) {
  const PolicyProblem p = problem(5);
  const at::Tensor old = leaf(p.old), advantages = leaf(p.advantages);
  policy_gradient(p.log_p, advantages, {.old_log_probabilities = old}).sum.backward();
  EXPECT_TRUE(p.log_p.grad().defined());
  EXPECT_FALSE(old.grad().defined() || advantages.grad().defined());
}

TEST(PolicyGradient, RefusesBadArguments) {
  const PolicyProblem p = problem(4);
  const auto message = [&](PolicyGradientOptions options) {
    return error_of([&] { policy_gradient(p.log_p, p.advantages, options); });
  };
  EXPECT_THAT(message({.clip_low = 0.2, .clip_high = 0.2}),
              HasSubstr("a clip without old log-probabilities"));
  EXPECT_THAT(message({.old_log_probabilities = p.old, .clip_low = 0.2}), HasSubstr("clip_high = -1"));
  EXPECT_THAT(message({.old_log_probabilities = p.old, .clip_low = 2, .clip_high = 1}),
              HasSubstr("clip_low = 2"));
  EXPECT_THAT(message({.old_log_probabilities = at::zeros({3})}), HasSubstr("old log-probabilities [3]"));
  EXPECT_THAT(message({.weights = at::full({4}, -1.0)}), HasSubstr("weights[0] = -1"));
  EXPECT_THAT(error_of([&] { policy_gradient(p.log_p.view({2, 2}), p.advantages); }), HasSubstr("[2, 2]"));
  EXPECT_THAT(error_of([&] { policy_gradient(p.log_p, p.advantages.to(at::kLong)); }),
              HasSubstr("advantages"));
  EXPECT_THAT(error_of([&] { reference_kl_sum(p.log_p, at::zeros({3})); }), HasSubstr("reference"));
}

}  // namespace
}  // namespace isograd
