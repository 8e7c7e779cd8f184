#include "kernels/softmax.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "kernels/naive_testing.hpp"

namespace isograd::kernels {
namespace {

template <typename T>
T make(double x);
template <>
float make<float>(double x) {
  return static_cast<float>(x);
}
template <>
double make<double>(double x) {
  return x;
}
template <>
Bfloat16 make<Bfloat16>(double x) {
  return to_bfloat16(static_cast<float>(x));
}

// Unit round-off of the computing type, and of the gradient's stored type.
template <typename T>
constexpr double kComputing = std::is_same_v<T, double> ? 0x1p-53 : 0x1p-24;
template <typename T>
constexpr double kStored = std::is_same_v<T, double>  ? 0x1p-53
                           : std::is_same_v<T, float> ? 0x1p-24
                                                      : 0x1p-8;

template <typename T>
class Softmax : public ::testing::Test {};
using Types = ::testing::Types<float, double, Bfloat16>;
TYPED_TEST_SUITE(Softmax, Types);

TYPED_TEST(Softmax, SumsAndGradientsAreThoseOfTheTwin) {
  using T = TypeParam;
  std::mt19937_64 bits(3);
  for (std::int64_t vocabulary : {1, 2, 31, 32, 33, 258, 1024, 2500}) {
    const std::int64_t rows = 3;
    std::normal_distribution<double> normal(0, 4);
    std::vector<T> logits(rows * vocabulary);
    for (T& x : logits) x = make<T>(normal(bits) + 50);
    const bool mask[rows] = {true, false, true};
    const std::int64_t targets[rows] = {vocabulary - 1, -100, vocabulary / 2};
    const double scale = -0.37;
    RowSum sums[rows] = {};
    row_sums(logits.data(), rows, vocabulary, mask, sums);
    EXPECT_EQ(sums[1].sum, 0) << "a row without target is left alone";
    std::vector<T> gradient(logits.size(), make<T>(99));
    RowGradient of[rows];
    for (std::int64_t t : {0, 2})
      of[t] = {.maximum = sums[t].maximum, .factor = scale / sums[t].sum, .at_target = scale};
    softmax_gradient(logits.data(), rows, vocabulary, mask, targets, of, gradient.data());
    for (std::int64_t t : {0, 2}) {
      const T* row = logits.data() + t * vocabulary;
      const double expected = naive::log_sum_exp(row, vocabulary);
      // exp within 2 units and a difference of size <= 40 rounded once (relative error of exp), lanes of
      // kTile / kLanes additions.
      const double relative = (4 + 40 + 32 + 5) * kComputing<T>;
      EXPECT_NEAR(sums[t].maximum + std::log(sums[t].sum), expected, relative) << vocabulary;
      for (std::int64_t j = 0; j < vocabulary; ++j) {
        const double reference = naive::cross_entropy_gradient(row, expected, targets[t], scale, j);
        const double probability = std::exp(naive::load(row[j]) - expected);
        EXPECT_NEAR(naive::load(gradient[t * vocabulary + j]), reference,
                    std::fabs(scale) * probability * 2 * relative + 2 * kStored<T> * std::fabs(reference) +
                        2 * kComputing<T> * std::fabs(scale) * (j == targets[t]))
            << j << " of " << vocabulary;
      }
    }
    for (std::int64_t j = 0; j < vocabulary; ++j) EXPECT_EQ(naive::load(gradient[vocabulary + j]), 0);
    // In place gives the same bits.
    softmax_gradient(logits.data(), rows, vocabulary, mask, targets, of, logits.data());
    EXPECT_EQ(std::memcmp(logits.data(), gradient.data(), logits.size() * sizeof(T)), 0);
  }
}

// A target's tile, a tile without it, and a row that does not count.
TYPED_TEST(Softmax, GeneralGradientAndLogitSumsAreThoseOfTheTwin) {
  using T = TypeParam;
  std::mt19937_64 bits(4);
  std::normal_distribution<double> normal(0, 4);
  for (std::int64_t vocabulary : {1, 2, 31, 32, 33, 258, 2500}) {
    const std::int64_t rows = 3;
    std::vector<T> logits(rows * vocabulary), gradient(logits.size(), make<T>(99));
    for (T& x : logits) x = make<T>(normal(bits) - 20);
    for (std::int64_t j = 0; j < vocabulary; ++j) logits[vocabulary + j] = make<T>(std::nan(""));
    const bool mask[rows] = {true, false, true};
    const std::int64_t targets[rows] = {vocabulary - 1, 0, vocabulary};
    const RowGradient each{.maximum = 3, .factor = 0.3, .uniform = 0.01, .at_target = -0.7};
    const std::vector<RowGradient> of(rows, each);
    softmax_gradient(logits.data(), rows, vocabulary, mask, targets, of.data(), gradient.data());
    std::vector<double> totals(rows, 5);
    logit_sums(logits.data(), rows, vocabulary, mask, totals.data());
    EXPECT_EQ(totals[1], 5) << "a row that counts for nothing is left alone";
    for (std::int64_t j = 0; j < vocabulary; ++j) EXPECT_EQ(naive::load(gradient[vocabulary + j]), 0);
    for (std::int64_t t : {0, 2}) {
      double total = 0, size = 0;
      for (std::int64_t j = 0; j < vocabulary; ++j) {
        const double x = naive::load(logits[t * vocabulary + j]),
                     power = each.factor * std::exp(x - each.maximum);
        const bool here = j == targets[t];
        const double reference = power - each.uniform - (here ? each.at_target : 0);
        // exp of a difference of size <= 60 rounded once, then three roundings.
        EXPECT_NEAR(naive::load(gradient[t * vocabulary + j]), reference,
                    power * (4 + 60) * kComputing<T> + 4 * kComputing<T> * (each.uniform + 0.7 * here) +
                        2 * kStored<T> * std::fabs(reference));
        total += x, size += std::fabs(x);
      }
      EXPECT_NEAR(totals[t], total, size * vocabulary * 0x1p-53);
    }
    softmax_gradient(logits.data(), rows, vocabulary, mask, targets, of.data(), logits.data());  // in place
    EXPECT_EQ(std::memcmp(logits.data(), gradient.data(), logits.size() * sizeof(T)), 0);
  }
}

TYPED_TEST(Softmax, NotANumberIsNeverSwallowed) {
  using T = TypeParam;
  const std::unique_ptr<bool[]> mask(new bool[1]{true});
  for (double bad : {std::nan(""), std::numeric_limits<double>::infinity()})
    for (std::int64_t place : {0, 5, 40}) {
      std::vector<T> logits(41, make<T>(1));
      logits[place] = make<T>(bad);
      RowSum sum;
      row_sums(logits.data(), 1, 41, mask.get(), &sum);
      EXPECT_FALSE(std::isfinite(sum.maximum + std::log(sum.sum))) << bad << " at " << place;
    }
}

template <typename T>
double worst_units() {
  std::vector<T> values, results;
  const double lowest = std::is_same_v<T, float> ? -87.3 : -708.3;
  for (int i = 0; i <= 300000; ++i) values.push_back(static_cast<T>(lowest * i / 300000));
  for (int i = 0; i < 1000; ++i) values.push_back(static_cast<T>(-std::ldexp(1.0 + i / 1000.0, -i / 20)));
  results.resize(values.size());
  exp_nonpositive(values.data(), static_cast<std::int64_t>(values.size()), results.data());
  double worst = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const long double exact = std::exp(static_cast<long double>(values[i]));
    const double unit = std::is_same_v<T, float> ? 0x1p-23 : 0x1p-52;
    worst = std::max(worst, static_cast<double>(std::fabs((results[i] - exact) / exact) / unit));
  }
  return worst;
}

TEST(Exponential, IsWithinTwoUnitsInTheLastPlace) {
  EXPECT_LT(worst_units<float>(), 2);
  EXPECT_LT(worst_units<double>(), 2);
  const float edge[] = {0.f, -0.f, -100.f, -INFINITY, NAN};
  float result[5];
  exp_nonpositive(edge, 5, result);
  EXPECT_EQ(result[0], 1);
  EXPECT_EQ(result[1], 1);
  EXPECT_EQ(result[2], 0);
  EXPECT_EQ(result[3], 0);
  EXPECT_TRUE(std::isnan(result[4]));
}

}  // namespace
}  // namespace isograd::kernels
