// The vector code against plain loops over std::exp in long double, in every version of this processor.
#include "kernels/sigmoid.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/versions.hpp"

namespace isograd::kernels {
namespace {

template <typename T>
class Sigmoid : public ::testing::Test {};
using Types = ::testing::Types<float, double>;
TYPED_TEST_SUITE(Sigmoid, Types);

template <typename T>
struct Case {
  std::vector<T> values, anchors, weights;
  T scale;
};

template <typename T>
Case<T> make_case(std::size_t num_values, std::size_t num_anchors, T scale) {
  std::mt19937_64 bits(num_values + 7 * num_anchors);
  std::normal_distribution<double> normal(0, 2);
  Case<T> made{.values = std::vector<T>(num_values),
               .anchors = std::vector<T>(num_anchors),
               .weights = std::vector<T>(num_anchors),
               .scale = scale};
  for (T& x : made.values) x = static_cast<T>(normal(bits));
  for (T& x : made.anchors) x = static_cast<T>(normal(bits));
  for (T& x : made.weights) x = static_cast<T>(normal(bits));
  return made;
}

TYPED_TEST(Sigmoid, SumsAndSlopesAreThoseOfTheTwin) {
  using T = TypeParam;
  constexpr double kUnit = std::is_same_v<T, double> ? 0x1p-53 : 0x1p-24;
  for (const std::size_t n : {1, 31, 32, 33, 1024, 1025, 2500})
    for (const std::size_t m : {1, 5, 63, 64, 130})
      for (const T scale : {T(1), T(-0.5), T(100), T(1e4)}) {
        const Case<T> c = make_case<T>(n, m, scale);
        std::vector<double> sums(m, 0.25), by_anchor(m, 0), by_value(n, 0);
        const auto values = static_cast<std::int64_t>(n), anchors = static_cast<std::int64_t>(m);
        sigmoid_sums(c.values.data(), values, c.anchors.data(), anchors, scale, sums.data());
        sigmoid_slopes(c.values.data(), values, c.anchors.data(), c.weights.data(), anchors, scale,
                       by_value.data(), by_anchor.data());
        std::vector<long double> value_gradient(n, 0), value_size(n, 0);
        for (std::size_t k = 0; k < m; ++k) {
          long double sum = 0.25L, slopes = 0;
          for (std::size_t j = 0; j < n; ++j) {
            const T z = (c.values[j] - c.anchors[k]) * scale;  // its rounding is not the kernel's
            const long double sigma = 1 / (1 + std::exp(-static_cast<long double>(z)));
            const long double other = 1 / (1 + std::exp(static_cast<long double>(z)));
            sum += sigma;
            slopes += sigma * other;
            value_gradient[j] += c.weights[k] * sigma * other;
            value_size[j] += std::abs(static_cast<long double>(c.weights[k])) * sigma * other;
          }
          // Each σ is off by 4 units, each of kTile / kLanes additions to a lane and 5 folds by one more.
          ASSERT_NEAR(sums[k], static_cast<double>(sum),
                      (4 + 32 + 5) * kUnit * static_cast<double>(sum) + 1e-300);
          // Where e^-|z| would be subnormal it is 0: at most n times the smallest normal number.
          const double tiny = static_cast<double>(n) * (std::is_same_v<T, double> ? 1e-307 : 1.2e-38);
          ASSERT_NEAR(by_anchor[k], static_cast<double>(slopes),
                      (8 + 32 + 5) * kUnit * static_cast<double>(slopes) + tiny);
        }
        for (std::size_t j = 0; j < n; ++j)
          ASSERT_NEAR(by_value[j], static_cast<double>(value_gradient[j]),
                      (8 + 64 + 1) * kUnit * static_cast<double>(value_size[j]) + 1e-34);
      }
}

TYPED_TEST(Sigmoid, SaturatesAndTiesExactly) {
  using T = TypeParam;
  const T values[] = {T(3), T(1e30), T(-1e30)}, anchor[] = {T(3)}, weight[] = {T(1)};
  double sum = 0, by_anchor = 0, by_value[3] = {};
  sigmoid_sums(values, 3, anchor, 1, T(100), &sum);
  sigmoid_slopes(values, 3, anchor, weight, 1, T(100), by_value, &by_anchor);
  EXPECT_EQ(sum, 1.5);
  EXPECT_EQ(by_anchor, 0.25);
  EXPECT_EQ(by_value[0], 0.25);
  EXPECT_EQ(by_value[1] + by_value[2], 0);
}

#if defined(__x86_64__) && defined(__GNUC__)
TYPED_TEST(Sigmoid, HasTheSameBitsInEveryVersion) {
  using T = TypeParam;
  const Case<T> c = make_case<T>(2077, 70, T(3));
  const int best = processor_level();
  std::vector<double> expected;
  for (int level = 0; level <= best; ++level) {
    processor_level() = level;
    std::vector<double> out(70 + 70 + 2077, 0);
    sigmoid_sums(c.values.data(), 2077, c.anchors.data(), 70, T(3), out.data());
    sigmoid_slopes(c.values.data(), 2077, c.anchors.data(), c.weights.data(), 70, T(3), out.data() + 140,
                   out.data() + 70);
    if (level == 0)
      expected = out;
    else
      EXPECT_EQ(std::memcmp(out.data(), expected.data(), out.size() * sizeof(double)), 0)
          << "level " << level;
  }
  processor_level() = best;
}
#endif

}  // namespace
}  // namespace isograd::kernels
