#include "kernels/flat.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "kernels/naive_testing.hpp"

namespace isograd::kernels {
namespace {

// Lengths around the width of a vector, and buffers that start off its alignment.
const std::int64_t kCounts[] = {0, 1, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 1000, 4099};

using naive::random_values;

template <typename T>
class Flat : public ::testing::Test {};
using Types = ::testing::Types<float, double>;
TYPED_TEST_SUITE(Flat, Types);

TYPED_TEST(Flat, SquaredNormIsExactToDoubleRounding) {
  for (std::int64_t count : kCounts) {
    auto values = random_values<TypeParam>(count + 1, 1 + count);
    const double expected = naive::squared_norm(values.data() + 1, count);
    // At most count roundings of 2^-53 on a sum of positive terms.
    EXPECT_NEAR(squared_norm(values.data() + 1, count), expected, expected * count * 0x1p-53) << count;
  }
}

TYPED_TEST(Flat, SquaredNormCountsEveryElementOnce) {
  for (std::int64_t count : kCounts)
    for (std::int64_t i = 0; i<count; i += count> 100 ? 97 : 1) {
      std::vector<TypeParam> values(count);
      values[i] = 3;
      EXPECT_EQ(squared_norm(values.data(), count), 9) << i << " of " << count;
    }
}

TEST(SquaredNorm, DoesNotOverflowOrLoseSmallTerms) {
  std::vector<float> large(100, 3e38f);
  EXPECT_NEAR(squared_norm(large.data(), 100) / 9e78, 1, 1e-6);
  std::vector<float> many(1 << 21, 1e-3f);  // fp32 would stop growing at 2^24 · 1e-6 and be wrong before
  EXPECT_NEAR(squared_norm(many.data(), 1 << 21), (1 << 21) * double(1e-3f) * double(1e-3f), 1e-9);
  many[77] = NAN;
  EXPECT_TRUE(std::isnan(squared_norm(many.data(), 1 << 21)));
}

TEST(AdamW, PaddingOfZerosStaysZero) {
  std::vector<float> g(64), p(64), m(64), v(64);
  adamw({.keep = 0.99, .step_size = 0.1}, g.data(), p.data(), m.data(), v.data(), nullptr, 64);
  for (float x : p) EXPECT_EQ(x, 0);
}

// Reference: the two neighbours in bf16, and the nearer of them (even on a tie), found in double.
TEST(Bfloat16Rounding, IsToNearestEven) {
  std::mt19937 bits(9);
  for (int i = 0; i < 200000; ++i) {
    std::uint32_t pattern = bits();
    if (i % 4 == 0) pattern = (pattern & 0xffff0000u) | 0x8000u;  // ties
    if (i % 4 == 1) pattern = (pattern & 0xffff0000u) | (i % 8 == 1 ? 0x7fffu : 0x8001u);
    const float value = std::bit_cast<float>(pattern);
    const Bfloat16 result = to_bfloat16(value);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(to_float(result)));
      continue;
    }
    if (!std::isfinite(value)) {
      EXPECT_EQ(to_float(result), value);
      continue;
    }
    const auto low_bits = static_cast<std::uint16_t>(pattern >> 16);
    const double low = to_float({low_bits});
    double high = to_float({static_cast<std::uint16_t>(low_bits + 1)});
    if (std::isinf(high)) high = std::copysign(0x1p128, high);  // the next number would be there
    const double to_low = std::fabs(value - low), to_high = std::fabs(high - value);
    const std::uint16_t expected =
        to_low < to_high || (to_low == to_high && low_bits % 2 == 0) ? low_bits : low_bits + 1;
    ASSERT_EQ(result.bits, expected) << value;
  }
}

}  // namespace
}  // namespace isograd::kernels
