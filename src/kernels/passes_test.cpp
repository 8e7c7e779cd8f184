// Passes that change or measure a buffer, and updates, compared with their twins: on
// lengths around a vector's, off its alignment, and on special values.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/flat.hpp"
#include "kernels/naive_testing.hpp"

namespace isograd::kernels {
namespace {

const std::int64_t kCounts[] = {0, 1, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 1000, 4099};

using naive::random_values;
using naive::stored;

// Zeros of both signs, the smallest numbers, the largest, infinities.
template <typename T>
std::vector<T> special_values() {
  using Limits = std::numeric_limits<std::conditional_t<std::is_same_v<T, Bfloat16>, float, T>>;
  std::vector<T> values;
  for (double x : {0.0, 1.0, double(Limits::min()), double(Limits::min()) / 4, double(Limits::max()),
                   double(Limits::infinity())})
    for (double sign : {1.0, -1.0}) values.push_back(stored<T>(sign * x));
  values.push_back(std::bit_cast<T>(
      std::conditional_t<sizeof(T) == 2, std::uint16_t,
                         std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>>(1)));
  return values;
}

template <typename T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

template <typename T>
class Passes : public ::testing::Test {};
using Types = ::testing::Types<float, double, Bfloat16>;
TYPED_TEST_SUITE(Passes, Types);

TYPED_TEST(Passes, MaxAbsSeesEveryElement) {
  using T = TypeParam;
  for (std::int64_t count : kCounts) {
    auto values = random_values<T>(count + 1, 1 + static_cast<unsigned>(count));
    EXPECT_EQ(max_abs(values.data() + 1, count), naive::max_abs(values.data() + 1, count)) << count;
    values[0] = stored<T>(900);  // before the range
    for (std::int64_t i = 0; i<count; i += count> 100 ? 97 : 1)
      for (double planted : {777.0, -777.0}) {
        const T was = std::exchange(values[i + 1], stored<T>(planted));
        EXPECT_EQ(max_abs(values.data() + 1, count), naive::load(stored<T>(777))) << i << " of " << count;
        values[i + 1] = was;
      }
  }
}

TYPED_TEST(Passes, MaxAbsNeverLosesANan) {
  using T = TypeParam;
  const std::int64_t count = 100;
  for (std::int64_t i = 0; i < count; ++i)
    for (double sign : {1.0, -1.0}) {
      auto values = random_values<T>(count, 3);
      values[(i + 50) % count] = stored<T>(INFINITY);
      EXPECT_EQ(max_abs(values.data(), count), INFINITY);
      values[i] = stored<T>(std::copysign(NAN, sign));
      EXPECT_TRUE(std::isnan(max_abs(values.data(), count))) << i;
    }
  const auto special = special_values<T>();
  EXPECT_EQ(max_abs(special.data(), static_cast<std::int64_t>(special.size())), INFINITY);
  const T smallest[2] = {special.back(), special[1]};
  EXPECT_EQ(max_abs(smallest, 2), naive::load(special.back()));
  EXPECT_GT(max_abs(smallest, 2), 0);
}

TEST(Bfloat16Cast, WidensExactlyAndRoundsBack) {
  for (std::uint32_t i = 0; i < 1 << 16; ++i) {
    const float wide = to_float(Bfloat16{static_cast<std::uint16_t>(i)});
    ASSERT_EQ(std::bit_cast<std::uint32_t>(wide), i << 16);
    ASSERT_EQ(to_bfloat16(wide).bits, std::isnan(wide) ? 0x7fc0 : i);
  }
}

TEST(Bfloat16Gradients, NormIsThatOfTheWidenedValues) {
  for (std::int64_t count : kCounts) {
    const auto values = random_values<Bfloat16>(count + 1, 21);
    std::vector<float> wide;
    for (const Bfloat16 value : values) wide.push_back(to_float(value));
    EXPECT_EQ(squared_norm(values.data() + 1, count), squared_norm(wide.data() + 1, count)) << count;
  }
}

// Gradients of this type; with bf16 ones everything else is in fp32.
TYPED_TEST(Passes, UpdatesHaveTheBitsOfTheirTwins) {
  using T = std::conditional_t<std::is_same_v<TypeParam, Bfloat16>, float, TypeParam>;
  const AdamW adam{.gradient_scale = 0.37,
                   .keep = 0.9993,
                   .beta2 = 0.95,
                   .step_size = 3e-3,
                   .inverse_root_correction = 1.7};
  for (std::int64_t count : kCounts)
    for (bool rounding : {false, true}) {
      if (rounding && std::is_same_v<T, double>) continue;
      const auto gradients = random_values<TypeParam>(count + 1, 2);
      auto p = random_values<T>(count + 1, 3), m = random_values<T>(count + 1, 4),
           v = random_values<T>(count + 1, 5), b = random_values<T>(count + 1, 6);
      for (T& x : v) x = x * x;
      auto p2 = p, m2 = m, v2 = v, b2 = b;
      std::vector<Bfloat16> out(count + 1), out2(count + 1);
      Bfloat16* rounded = rounding ? out.data() + 1 : nullptr;
      Bfloat16* rounded2 = rounding ? out2.data() + 1 : nullptr;
      adamw(adam, gradients.data() + 1, p.data() + 1, m.data() + 1, v.data() + 1, rounded, count);
      naive::adamw(adam, gradients.data() + 1, p2.data() + 1, m2.data() + 1, v2.data() + 1, rounded2, count);
      EXPECT_EQ(bytes_of(p) + bytes_of(m) + bytes_of(v) + bytes_of(out),
                bytes_of(p2) + bytes_of(m2) + bytes_of(v2) + bytes_of(out2));
      for (double momentum : {0.0, 0.9}) {
        const Sgd scalars{
            .gradient_scale = 0.7, .learning_rate = 0.03, .momentum = momentum, .weight_decay = 0.01};
        sgd(scalars, gradients.data() + 1, p.data() + 1, momentum > 0 ? b.data() + 1 : nullptr, rounded,
            count);
        naive::sgd(scalars, gradients.data() + 1, p2.data() + 1,
                   momentum > 0 ? b2.data() + 1 : static_cast<T*>(nullptr), rounded2, count);
        EXPECT_EQ(bytes_of(p) + bytes_of(b) + bytes_of(out), bytes_of(p2) + bytes_of(b2) + bytes_of(out2));
      }
    }
}

}  // namespace
}  // namespace isograd::kernels
