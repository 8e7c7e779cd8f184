// 100,000 keyed draws against the exact distribution, and what cannot be drawn.
#include "sampler/draw.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "isograd/random.hpp"

namespace isograd {
namespace {

constexpr std::uint64_t kDrawSeed = 11;

std::vector<double> some_logits(std::size_t count) {
  std::vector<double> logits(count);
  for (std::size_t i = 0; i < count; ++i) logits[i] = 1.5 * random_normal({.seed = kDrawSeed}, i);
  logits[3] = logits[8];  // equally likely: the smaller number counts first
  return logits;
}

// By the definition: everything sorted.
std::vector<double> expected_probabilities(const std::vector<double>& logits, const Draw& how) {
  std::vector<std::size_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0u);
  std::ranges::stable_sort(order, [&](auto a, auto b) { return logits[a] > logits[b]; });
  if (how.top_k > 0) order.resize(std::min(order.size(), static_cast<std::size_t>(how.top_k)));
  long double total = 0, reached = 0, kept = 0;
  const auto weight = [&](std::size_t token) {
    return std::exp(static_cast<long double>(logits[token]) / static_cast<long double>(how.temperature));
  };
  for (const auto token : order) total += weight(token);
  std::vector<double> result(logits.size());
  for (const auto token : order) {
    if (reached >= how.top_p * total) break;
    reached += weight(token);
    result[token] = static_cast<double>(weight(token));
  }
  for (const double one : result) kept += one;
  for (double& one : result) one /= static_cast<double>(kept);
  return result;
}

// The chance of a chi-squared as large, by Wilson and Hilferty's normal approximation; 0 if what cannot be
// was drawn.
double chance(const std::vector<std::int64_t>& counts, const std::vector<double>& expected,
              std::int64_t draws) {
  double sum = 0, rare = 0, rare_count = 0;
  int cells = 0;
  const auto add = [&](double count, double mean) { sum += (count - mean) * (count - mean) / mean, ++cells; };
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const double mean = expected[i] * static_cast<double>(draws);
    if (mean == 0 && counts[i] > 0) return 0;
    if (mean >= 5)
      add(static_cast<double>(counts[i]), mean);
    else
      rare += mean, rare_count += static_cast<double>(counts[i]);
  }
  if (rare >= 5) add(rare_count, rare);
  if (cells < 2) return 1;
  const double freedom = cells - 1, spread = 2 / (9 * freedom);
  const double z = (std::cbrt(sum / freedom) - (1 - spread)) / std::sqrt(spread);
  return 0.5 * std::erfc(z / std::sqrt(2.0));
}

template <typename T>
double chance_of(const std::vector<double>& logits, const Draw& how, const std::vector<double>& expected) {
  constexpr std::int64_t kDraws = 100000;
  const std::vector<T> given(logits.begin(), logits.end());
  const TokenDistribution distribution(given.data(), std::ssize(given), how.temperature);
  std::vector<std::int64_t> counts(logits.size());
  for (std::int64_t i = 0; i < kDraws; ++i)
    ++counts[static_cast<std::size_t>(distribution.draw(
        how, random_uniform({.seed = kDrawSeed, .sample = 4}, static_cast<std::uint64_t>(i))))];
  return chance(counts, expected, kDraws);
}

TEST(Draw, FollowsTheDistribution) {
  const auto logits = some_logits(150);
  for (const double temperature : {0.3, 1.0, 1.7})
    for (const auto& [top_k, top_p] :
         {std::pair<std::int64_t, double>{0, 1.0}, {7, 1.0}, {0, 0.8}, {0, 0.999}, {20, 0.6}}) {
      const Draw how{.temperature = temperature, .top_k = top_k, .top_p = top_p};
      const auto expected = expected_probabilities(logits, how);
      EXPECT_GT(chance_of<double>(logits, how, expected), 1e-3)
          << temperature << " " << top_k << " " << top_p << " seed " << kDrawSeed;
      EXPECT_GT(chance_of<float>(logits, how, expected), 1e-3) << temperature << " " << top_k << " " << top_p;
    }
}

TEST(Draw, AWrongTemperatureOrCutIsSeen) {
  const auto logits = some_logits(150);
  const auto caught = [&](const Draw& drawn, const Draw& promised) {
    return chance_of<double>(logits, drawn, expected_probabilities(logits, promised)) < 1e-3;
  };
  EXPECT_TRUE(caught({.temperature = 1.02}, {.temperature = 1}));
  EXPECT_TRUE(caught({.top_k = 8}, {.top_k = 7}));
  EXPECT_TRUE(caught({.top_p = 0.82}, {.top_p = 0.8}));
}

TEST(Draw, LikeliestAreInOrderAndTiesByNumber) {
  const std::vector<double> logits{1, 3, 2, 3, -1};
  const TokenDistribution distribution(logits.data(), 5, 1);
  EXPECT_EQ(distribution.likeliest(3), (std::vector<std::int64_t>{1, 3, 2}));
  EXPECT_EQ(distribution.likeliest(5), (std::vector<std::int64_t>{1, 3, 2, 0, 4}));
  EXPECT_EQ(distribution.draw({.temperature = 0}, 0.9), 1);
  EXPECT_EQ(distribution.draw({.top_k = 1}, 0.9), 1);
  double sum = 0;
  for (int i = 0; i < 5; ++i) sum += std::exp(distribution.log_probability(i));
  EXPECT_NEAR(sum, 1, 1e-15);
}

TEST(Draw, EndsOfTheInterval) {
  const std::vector<double> logits{0, -std::numeric_limits<double>::infinity(), 0,
                                   -std::numeric_limits<double>::infinity()};
  const TokenDistribution distribution(logits.data(), 4, 1);
  ASSERT_TRUE(distribution.finite());
  EXPECT_EQ(distribution.draw({}, 0), 0);
  EXPECT_EQ(distribution.draw({}, 0.5), 2);
  EXPECT_EQ(distribution.draw({}, std::nextafter(1.0, 0.0)), 2);
}

TEST(Draw, WhatIsNotFiniteIsNamed) {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN(),
                   kInfinity = std::numeric_limits<double>::infinity();
  for (const auto& logits : std::vector<std::vector<double>>{
           {kNaN, 1, 2}, {1, kNaN, 2}, {2, 1, kNaN}, {1, kInfinity, 2}, {-kInfinity, -kInfinity, -kInfinity}})
    EXPECT_FALSE(TokenDistribution(logits.data(), 3, 1).finite());
}

}  // namespace
}  // namespace isograd
