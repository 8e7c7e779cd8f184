// Experts on one device against a loop over them, and against numbers by hand.
#include "model/experts.hpp"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>

#include "base/error_testing.hpp"

namespace isograd {
namespace {

constexpr std::int64_t kHidden = 10, kInner = 6;

struct Weights {
  at::Tensor router, gate, up, down;
  std::vector<at::Tensor> all() const { return {router, gate, up, down}; }
};

at::Tensor random(at::IntArrayRef shape, at::ScalarType type, std::uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(shape, generator, at::TensorOptions(at::kDouble)).mul(0.5).to(at::kBFloat16).to(type);
}

Weights weights(std::int64_t experts, at::ScalarType type) {
  Weights made{random({experts, kHidden}, type, 1), random({experts, kInner, kHidden}, type, 2),
               random({experts, kInner, kHidden}, type, 3), random({experts, kHidden, kInner}, type, 4)};
  for (at::Tensor weight : made.all()) weight.requires_grad_();
  return made;
}

struct Layer {
  at::Tensor y;
  std::vector<at::Tensor> gradients;  // of x and the weights
};

Layer run(const at::Tensor& values, const Weights& weights, const ExpertsShape& options, bool naive) {
  const at::Tensor x = values.detach().clone().requires_grad_();
  const Routing routing = route(x.matmul(weights.router.t()), options);
  Layer layer;
  if (naive) {
    layer.y = naive_twin::experts(x, routing, weights.gate, weights.up, weights.down);
  } else {
    const ByExpert order = sort_by_expert(routing.chosen, weights.gate.size(0));
    const at::Tensor rows =
        compute_experts(copy_to_experts(x, order), weights.gate, weights.up, weights.down, order.begin);
    layer.y = add_by_weight(rows, routing.weights, order);
  }
  std::vector<at::Tensor> leaves = weights.all();
  leaves.insert(leaves.begin(), x);
  const at::Tensor to = random(values.sizes(), values.scalar_type(), 9);
  layer.gradients =
      torch::autograd::grad({layer.y}, leaves, {to}, std::nullopt, false, /*allow_unused=*/true);
  return layer;
}

double off(const at::Tensor& found, const at::Tensor& wanted) {
  const at::Tensor exact = wanted.to(at::kDouble);
  return ((found.to(at::kDouble) - exact).norm() / exact.norm().clamp_min(1e-300)).item<double>();
}

TEST(Experts, AreThoseOfALoopOverThem) {
  for (const std::int64_t experts : {1, 4, 5, 8, 60})
    for (const std::int64_t each : {1, 2, 4})
      for (const bool normalise : {true, false})
        for (const std::int64_t tokens : {1, 3, 40}) {
          if (each > experts) continue;
          const ExpertsShape options{.per_token = each, .normalise = normalise};
          const Weights weights_of = weights(experts, at::kDouble);
          const at::Tensor x = random({tokens, kHidden}, at::kDouble, 5);
          const Layer found = run(x, weights_of, options, false), wanted = run(x, weights_of, options, true);
          EXPECT_LT(off(found.y, wanted.y), 1e-14);
          for (std::size_t i = 0; i < wanted.gradients.size(); ++i) {
            // One expert's weight is always 1: but for rounding no gradient reaches the router.
            if (i == 1 && each == 1 && normalise)
              EXPECT_LT(found.gradients[i].norm().item<double>(), 1e-13);
            else
              EXPECT_LT(off(found.gradients[i], wanted.gradients[i]), 1e-13)
                  << experts << " experts, " << each << " a token, " << tokens << " tokens, gradient " << i;
          }
        }
}

// E2: what rounding does to the grouped products is at most four times what it does to the loop.
TEST(Experts, RoundNoWorseThanALoopInLowerPrecision) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    const ExpertsShape options{.per_token = 2};
    const at::Tensor x = random({64, kHidden}, at::kDouble, 5);
    const Layer exact = run(x, weights(8, at::kDouble), options, true),
                alone = run(x.to(type), weights(8, type), options, true),
                found = run(x.to(type), weights(8, type), options, false);
    EXPECT_LE(off(found.y, exact.y), 4 * off(alone.y, exact.y));
    for (std::size_t i = 0; i < exact.gradients.size(); ++i)
      EXPECT_LE(off(found.gradients[i], exact.gradients[i]), 4 * off(alone.gradients[i], exact.gradients[i]))
          << i << ", " << c10::toString(type);
  }
}

TEST(Experts, WithoutTokensHaveAGradientOfZero) {
  const std::int64_t experts = 6;
  Weights of = weights(experts, at::kDouble);
  const at::Tensor x = random({7, kHidden}, at::kDouble, 5).abs();
  {
    const at::NoGradGuard no_grad;  // all tokens to experts 4 and 2
    of.router.fill_(0);
    of.router.select(0, 4).fill_(2), of.router.select(0, 2).fill_(1);
  }
  const Layer found = run(x, of, {.per_token = 2}, false);
  for (std::size_t i = 2; i < 5; ++i)  // gate, up, down
    for (std::int64_t e = 0; e < experts; ++e)
      EXPECT_EQ(found.gradients[i][e].ne(0).any().item<bool>(), e == 4 || e == 2) << i << ", " << e;
  const Layer none = run(x.narrow(0, 0, 0), of, {.per_token = 2}, false);
  EXPECT_EQ(none.y.sizes(), (std::vector<std::int64_t>{0, kHidden}));
  for (std::size_t i = 1; i < 5; ++i) EXPECT_EQ(none.gradients[i].norm().item<double>(), 0) << i;
}

TEST(Router, TakesTheLowerIndexOfEquals) {
  const at::Tensor logits = at::zeros({3, 70}, at::kFloat);
  logits[1][69] = logits[1][33] = logits[1][50] = 1;
  const Routing routing = route(logits, {.per_token = 3});
  EXPECT_TRUE(routing.chosen[0].equal(at::tensor({0, 1, 2}, at::kLong)));
  EXPECT_TRUE(routing.chosen[1].equal(at::tensor({33, 50, 69}, at::kLong)));
  EXPECT_NEAR(routing.weights.sum().item<double>(), 3, 1e-6);
}

// By plain loops over one token: the best groups by their two best, then the best experts of these.
std::vector<std::int64_t> chosen_plainly(const std::vector<double>& scores, const ExpertsShape& shape) {
  const auto best = [](const std::vector<double>& values, std::int64_t count) {
    std::vector<std::int64_t> taken;
    for (std::int64_t i = 0; i < count; ++i) {
      std::int64_t most = -1;
      for (std::int64_t e = 0; e < static_cast<std::int64_t>(values.size()); ++e)
        if (std::find(taken.begin(), taken.end(), e) == taken.end() &&
            (most < 0 || values[static_cast<std::size_t>(e)] > values[static_cast<std::size_t>(most)]))
          most = e;
      taken.push_back(most);
    }
    return taken;
  };
  const std::int64_t each = static_cast<std::int64_t>(scores.size()) / shape.groups;
  std::vector<double> of_group, allowed(scores.size(), -1e300);
  for (std::int64_t group = 0; group < shape.groups; ++group) {
    std::vector<double> own(scores.begin() + group * each, scores.begin() + (group + 1) * each);
    std::sort(own.begin(), own.end());
    of_group.push_back(own[own.size() - 1] + own[own.size() - 2]);
  }
  for (const std::int64_t group : best(of_group, shape.groups_per_token))
    std::copy_n(scores.begin() + group * each, each, allowed.begin() + group * each);
  return best(allowed, shape.per_token);
}

TEST(Router, OfSigmoidsChoosesWithTheBiasAndWeighsWithoutIt) {
  struct Case {
    std::int64_t experts, each, groups, of_groups;
  };
  for (const auto& [experts, each, groups, of_groups] :
       {Case{5, 2, 1, 1}, Case{12, 3, 4, 2}, Case{12, 6, 4, 2}, Case{60, 4, 6, 1}, Case{8, 8, 2, 2}})
    for (const bool normalise : {true, false})
      for (const double bias_size : {0.0, 0.4}) {
        const ExpertsShape shape{.count = experts,
                                 .per_token = each,
                                 .normalise = normalise,
                                 .sigmoid = true,
                                 .groups = groups,
                                 .groups_per_token = of_groups,
                                 .scale = 2.5};
        const at::Tensor logits = random({40, experts}, at::kDouble, 3).mul(4).requires_grad_();
        const at::Tensor bias = random({experts}, at::kDouble, 4).mul(bias_size).to(at::kFloat);
        const Routing routing = route(logits, shape, bias);
        EXPECT_EQ(routing.weights.requires_grad(), true);
        std::int64_t others = 0;  // that the bias turned
        for (std::int64_t t = 0; t < 40; ++t) {
          std::vector<double> scores, biased;
          for (std::int64_t e = 0; e < experts; ++e) {
            scores.push_back(1 / (1 + std::exp(-logits[t][e].item<double>())));
            biased.push_back(scores.back() + bias[e].item<double>());
          }
          const auto wanted = chosen_plainly(biased, shape);
          others += wanted != chosen_plainly(scores, shape);
          double sum = 0;
          for (const std::int64_t e : wanted) sum += scores[static_cast<std::size_t>(e)];
          for (std::int64_t j = 0; j < each; ++j) {
            const auto e = static_cast<std::size_t>(wanted[static_cast<std::size_t>(j)]);
            EXPECT_EQ(routing.chosen[t][j].item<std::int64_t>(), wanted[static_cast<std::size_t>(j)]);
            EXPECT_NEAR(routing.weights[t][j].item<double>(), 2.5 * scores[e] / (normalise ? sum : 1), 1e-14);
          }
        }
        EXPECT_EQ(others > 0, bias_size > 0) << experts;
      }
}

TEST(Router, OfSigmoidsTakesTheLowerOfEqualGroupsAndExperts) {
  const ExpertsShape shape{.count = 8, .per_token = 3, .sigmoid = true, .groups = 4, .groups_per_token = 2};
  at::Tensor logits = at::zeros({2, 8}, at::kDouble);
  logits[1][6] = logits[1][2] = 1;
  const Routing routing = route(logits, shape, at::zeros({8}, at::kFloat));
  EXPECT_TRUE(routing.chosen[0].equal(at::tensor({0, 1, 2}, at::kLong)));
  EXPECT_TRUE(routing.chosen[1].equal(at::tensor({2, 6, 3}, at::kLong)));
}

TEST(Router, ProbabilitiesOfTokensAddUpToOne) {
  const at::Tensor logits = random({9, 5}, at::kFloat, 3).mul(30);
  for (const bool sigmoid : {true, false}) {
    const at::Tensor found = router_probabilities(logits, {.sigmoid = sigmoid});
    const at::Tensor score =
        sigmoid ? 1 / (1 + logits.to(at::kDouble).neg().exp()) : logits.to(at::kDouble).exp();
    EXPECT_TRUE(found.allclose(score / score.sum(1, true), 1e-12, 0)) << sigmoid;
  }
}

TEST(Router, SortsCopiesByExpertInTheirOwnOrder) {
  const at::Tensor chosen = at::tensor({3, 1, 1, 0, 3, 1}, at::kLong).view({3, 2});
  const ByExpert order = sort_by_expert(chosen, 5);
  EXPECT_EQ(order.begin, (std::vector<std::int64_t>{0, 1, 4, 4, 6, 6}));
  EXPECT_TRUE(order.token.equal(at::tensor({1, 0, 1, 2, 0, 2}, at::kLong)));
  EXPECT_TRUE(order.choice.equal(at::tensor({3, 1, 2, 5, 0, 4}, at::kLong)));
  EXPECT_TRUE(order.row.index_select(0, order.choice).equal(at::arange(6, at::kLong)));
}

TEST(Router, RefusesMoreExpertsThanThereAre) {
  const at::Tensor logits = at::zeros({3, 4});
  for (const std::int64_t each : {0, 5})
    EXPECT_THAT(error_testing::error_of([&] { route(logits, {.per_token = each}); }),
                ::testing::HasSubstr("1 to 4, the experts"));
}

}  // namespace
}  // namespace isograd
