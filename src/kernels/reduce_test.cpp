#include "kernels/reduce.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/bfloat16.hpp"

namespace isograd::kernels {
namespace {

// The value of input k at index i: exact in every number format, and distinct along both.
template <typename T>
T encode(int k, std::int64_t i) {
  return static_cast<T>((k + 1) * 3 + i % 17);
}

template <typename T>
void sum_slices(const T* const* inputs, int count, std::int64_t begin, std::int64_t end, T* const* outputs,
                int outputs_count) {
  constexpr Number kNumber = std::is_same_v<T, double>  ? Number::kFloat64
                             : std::is_same_v<T, float> ? Number::kFloat32
                             : sizeof(T) == 8           ? Number::kInt64
                             : sizeof(T) == 4           ? Number::kInt32
                                                        : Number::kUInt8;
  reduce_slices(kNumber, Combine::kSum, reinterpret_cast<const void* const*>(inputs), count, begin, end,
                reinterpret_cast<void* const*>(outputs), outputs_count);
}

template <typename T>
void check_sum(int count, std::int64_t n, bool in_place) {
  std::vector<std::vector<T>> inputs(static_cast<std::size_t>(count),
                                     std::vector<T>(static_cast<std::size_t>(n) + 2));
  for (int k = 0; k < count; ++k) {
    for (std::int64_t i = 0; i < n + 2; ++i) inputs[k][i] = encode<T>(k, i);
  }
  auto outputs = inputs;
  std::vector<const T*> in;
  std::vector<T*> out;
  for (int k = 0; k < count; ++k) {
    in.push_back(in_place ? outputs[k].data() : inputs[k].data());
    out.push_back(outputs[k].data());
  }
  sum_slices<T>(in.data(), count, 1, n + 1, out.data(), count);
  for (int k = 0; k < count; ++k) {
    ASSERT_EQ(outputs[k].front(), encode<T>(k, 0)) << "before the range must stay";
    ASSERT_EQ(outputs[k].back(), encode<T>(k, n + 1)) << "after the range must stay";
    for (std::int64_t i = 1; i <= n; ++i) {
      T sum{};
      for (int j = 0; j < count; ++j) sum = static_cast<T>(sum + encode<T>(j, i));
      ASSERT_EQ(outputs[k][i], sum) << "count " << count << " n " << n << " output " << k << " index " << i;
    }
  }
}

template <typename T>
void check_sums() {
  for (int count : {1, 2, 3, 4, 5, 8}) {
    for (std::int64_t n : {0, 1, 7, 64, 511, 512, 513, 2000}) {
      check_sum<T>(count, n, false);
      check_sum<T>(count, n, true);
    }
  }
}

TEST(Reduce, SumsEveryTypeIntoEveryOutput) {
  check_sums<double>();
  check_sums<float>();
  check_sums<std::int64_t>();
  check_sums<std::int32_t>();
  check_sums<std::uint8_t>();
}

// The result of one operation over three inputs of one element each, into one output.
template <typename T>
T combined(Number number, Combine combine, T a, T b, T c, const double* factors = nullptr) {
  const void* in[3] = {&a, &b, &c};
  T result{};
  void* out[1] = {&result};
  reduce_slices(number, combine, in, 3, 0, 1, out, 1, factors);
  return result;
}

TEST(Reduce, ProductAverageAndScaledSum) {
  EXPECT_EQ(combined<double>(Number::kFloat64, Combine::kProduct, 2, -3, 7), -42);
  EXPECT_EQ(combined<float>(Number::kFloat32, Combine::kProduct, 2, -3, 7), -42);
  EXPECT_EQ(combined<std::int64_t>(Number::kInt64, Combine::kProduct, 1l << 40, 3, -5), -15 * (1l << 40));
  EXPECT_EQ(combined<std::int16_t>(Number::kInt16, Combine::kProduct, 300, 300, 1),
            std::int16_t(90000 - 65536));
  EXPECT_EQ(combined<std::int8_t>(Number::kInt8, Combine::kSum, 100, 27, 1), -128);
  EXPECT_EQ(combined<double>(Number::kFloat64, Combine::kAverage, 1, 2, 5), 8.0 / 3.0);
  EXPECT_EQ(combined<float>(Number::kFloat32, Combine::kAverage, 1, 2, 5), 8.0f / 3.0f);
  EXPECT_EQ(combined<std::int32_t>(Number::kInt32, Combine::kAverage, -1, -2, -5), -2);
  const double factors[3] = {0.5, 3, -1};
  EXPECT_EQ(combined<float>(Number::kFloat32, Combine::kScaledSum, 8, 5, 2, factors), 17);
  EXPECT_EQ(combined<double>(Number::kFloat64, Combine::kScaledSum, 8, 5, 2, factors), 17);
  EXPECT_TRUE(can_combine(Number::kBFloat16, Combine::kScaledSum));
  EXPECT_FALSE(can_combine(Number::kInt64, Combine::kScaledSum));
  EXPECT_FALSE(can_combine(Number::kFloat32, Combine::kAnd));
}

template <typename T>
std::vector<T> wild_values(std::size_t n, std::mt19937& random) {
  std::vector<T> values(n);
  std::uniform_real_distribution<double> value(-1, 1);
  for (T& x : values) x = static_cast<T>(std::ldexp(value(random), static_cast<int>(random() % 40) - 20));
  values[n / 2] = std::numeric_limits<T>::infinity();
  values[n / 3] = std::numeric_limits<T>::quiet_NaN();
  values[n / 4] = static_cast<T>(-0.0);
  return values;
}

// All passes must give the same bits: the one for a single output (separate, or any input), the one for as
// many outputs as inputs, and the general one for any other number of outputs.
template <typename T>
void check_passes(Number number, Combine combine, int count, std::int64_t begin, std::int64_t end,
                  bool planted = false) {
  const std::size_t n = static_cast<std::size_t>(end) + 3;
  std::mt19937 random(11);
  std::vector<std::vector<T>> inputs;
  for (int k = 0; k < count; ++k) inputs.push_back(wild_values<T>(n, random));
  const auto places = [](auto& buffers) {
    std::vector<void*> all;
    for (auto& buffer : buffers) all.push_back(buffer.data());
    return all;
  };
  const auto same = [](const std::vector<T>& a, const std::vector<T>& b) {
    return std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
  };
  const auto run = [&](std::vector<void*> from, const std::vector<void*>& to) {
    if (planted) std::swap(from[0], from.back());
    reduce_slices(number, combine, from.data(), count, begin, end, to.data(), static_cast<int>(to.size()));
  };
  std::vector<std::vector<T>> reference(static_cast<std::size_t>(count) + 1, std::vector<T>(n, T{7}));
  reduce_slices(number, combine, places(inputs).data(), count, begin, end, places(reference).data(),
                count + 1);

  bool all_same = true;
  std::vector<T> apart(n, T{7});
  run(places(inputs), {apart.data()});
  all_same &= same(apart, reference[0]);
  for (int over = 0; over < count; ++over) {
    auto copies = inputs;
    auto expected = inputs[over];
    std::copy(reference[0].begin() + begin, reference[0].begin() + end, expected.begin() + begin);
    run(places(copies), {copies[over].data()});
    for (int k = 0; k < count; ++k) all_same &= same(copies[k], k == over ? expected : inputs[k]);
  }
  std::vector<std::vector<T>> many(static_cast<std::size_t>(count), std::vector<T>(n, T{7}));
  run(places(inputs), places(many));
  for (const auto& output : many) all_same &= same(output, reference[0]);
  EXPECT_NE(all_same, planted) << "count " << count << ", " << begin << " to " << end;
}

TEST(Reduce, OneOutputAllOutputsAndAnyNumberOfThemGiveTheSameBits) {
  for (int count : {1, 2, 3, 4, 5}) {
    for (const auto& [begin, end] : {std::pair{0, 0}, {0, 5}, {1, 64}, {3, 1540}, {0, 4096}}) {
      check_passes<float>(Number::kFloat32, Combine::kSum, count, begin, end);
      check_passes<double>(Number::kFloat64, Combine::kSum, count, begin, end);
      check_passes<float>(Number::kFloat32, Combine::kAverage, count, begin, end);
      check_passes<double>(Number::kFloat64, Combine::kAverage, count, begin, end);
    }
  }
}

TEST(Reduce, AnotherOrderGivesOtherBits) {  // the test above can fail: three numbers in reverse order
  for (int count : {3, 4, 5}) {
    check_passes<float>(Number::kFloat32, Combine::kSum, count, 3, 1540, true);
    check_passes<double>(Number::kFloat64, Combine::kAverage, count, 3, 1540, true);
  }
}

TEST(Reduce, BitsAndBooleans) {
  EXPECT_EQ(combined<std::uint8_t>(Number::kUInt8, Combine::kAnd, 0xfc, 0x3f, 0x18), 0x18);
  EXPECT_EQ(combined<std::uint8_t>(Number::kUInt8, Combine::kOr, 0x80, 0x01, 0x10), 0x91);
  EXPECT_EQ(combined<std::int64_t>(Number::kInt64, Combine::kXor, -1, 5, 1), ~std::int64_t{4});
  for (int bits = 0; bits < 8; ++bits) {
    const std::uint8_t a = bits & 1, b = bits >> 1 & 1, c = bits >> 2 & 1;
    const auto all = [&](Combine combine) { return combined<std::uint8_t>(Number::kBool, combine, a, b, c); };
    EXPECT_EQ(all(Combine::kSum), a | b | c);
    EXPECT_EQ(all(Combine::kMax), a | b | c);
    EXPECT_EQ(all(Combine::kOr), a | b | c);
    EXPECT_EQ(all(Combine::kProduct), a & b & c);
    EXPECT_EQ(all(Combine::kMin), a & b & c);
    EXPECT_EQ(all(Combine::kAnd), a & b & c);
    EXPECT_EQ(all(Combine::kXor), a ^ b ^ c);
  }
  EXPECT_EQ(combined<std::uint8_t>(Number::kBool, Combine::kSum, 2, 0, 4), 1) << "a bool is 0 or 1";
  EXPECT_FALSE(can_combine(Number::kBool, Combine::kAverage));
}

TEST(Reduce, OrderIsThatOfTheInputsWhateverTheCut) {
  constexpr int kCount = 5;
  constexpr std::int64_t kN = 4001;
  std::mt19937 random(7);
  std::uniform_real_distribution<float> value(-1, 1);
  std::vector<std::vector<float>> inputs(kCount, std::vector<float>(kN));
  for (auto& input : inputs) {
    for (float& x : input) x = std::ldexp(value(random), static_cast<int>(random() % 40) - 20);
  }
  const float* in[kCount];
  for (int k = 0; k < kCount; ++k) in[k] = inputs[k].data();
  std::vector<float> cut(kN), reversed(kN);
  float* out[1] = {cut.data()};
  for (std::int64_t begin = 0; begin < kN;) {
    const std::int64_t end =
        std::min<std::int64_t>(kN, begin + 1 + static_cast<std::int64_t>(random() % 700));
    sum_slices<float>(in, kCount, begin, end, out, 1);
    begin = end;
  }
  const float* backwards[kCount];
  for (int k = 0; k < kCount; ++k) backwards[k] = in[kCount - 1 - k];
  float* other[1] = {reversed.data()};
  sum_slices<float>(backwards, kCount, 0, kN, other, 1);
  bool order_matters = false;
  for (std::int64_t i = 0; i < kN; ++i) {
    float sum = inputs[0][i];
    for (int k = 1; k < kCount; ++k) sum += inputs[k][i];
    ASSERT_EQ(std::bit_cast<std::uint32_t>(cut[i]), std::bit_cast<std::uint32_t>(sum)) << "index " << i;
    order_matters |= reversed[i] != sum;
  }
  EXPECT_TRUE(order_matters) << "the inputs are too tame to tell one order from another";
}

std::uint16_t bits16(float x) { return to_bfloat16(x).bits; }

TEST(Reduce, BFloat16AccumulatesInFloat32) {
  // 256 + 1 + 1 + ... in bf16 steps would stay 256 (its unit there is 2); in fp32 it is 264.
  std::vector<std::uint16_t> inputs[9];
  const void* in[9];
  for (int k = 0; k < 9; ++k) {
    inputs[k].assign(700, bits16(k == 0 ? 256.f : 1.f));
    in[k] = inputs[k].data();
  }
  std::vector<std::uint16_t> result(700);
  void* out[1] = {result.data()};
  reduce_slices(Number::kBFloat16, Combine::kSum, in, 9, 0, 700, out, 1);
  for (auto x : result) ASSERT_EQ(x, bits16(264.f));
}

TEST(Reduce, Float16IsReadAndRoundedExactly) {
  // Every fp16 number: the maximum with itself must return it (NaN: any NaN).
  std::vector<std::uint16_t> all(65536), result(65536);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  const void* in[2] = {all.data(), all.data()};
  void* out[1] = {result.data()};
  reduce_slices(Number::kFloat16, Combine::kMax, in, 2, 0, 65536, out, 1);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const bool nan = (i & 0x7fff) > 0x7c00;
    if (nan) {
      ASSERT_GT(result[i] & 0x7fff, 0x7c00) << i;
    } else {
      ASSERT_EQ(result[i], all[i]) << i;
    }
  }
  // Sums that fall between fp16 numbers: ties to even, and overflow to infinity.
  struct Case {
    std::uint16_t a, b, sum;
  };
  const Case cases[] = {
      {0x6800, 0x3c00, 0x6800},  // 2048 + 1 = 2049, a tie: down to 2048
      {0x6801, 0x3c00, 0x6802},  // 2050 + 1 = 2051, a tie: up to 2052
      {0x7bff, 0x4b80, 0x7bff},  // 65504 + 15: down
      {0x7bff, 0x4c00, 0x7c00},  // 65504 + 16 = 65520: infinity
      {0x0001, 0x0001, 0x0002},  // subnormals
      {0x03ff, 0x0001, 0x0400},  // subnormal + subnormal = smallest normal
      {0xc000, 0x3c00, 0xbc00},  // -2 + 1 = -1
  };
  for (const Case& c : cases) {
    const void* two[2] = {&c.a, &c.b};
    std::uint16_t sum = 0;
    void* one[1] = {&sum};
    reduce_slices(Number::kFloat16, Combine::kSum, two, 2, 0, 1, one, 1);
    EXPECT_EQ(sum, c.sum) << std::hex << c.a << " + " << c.b;
  }
}

TEST(Reduce, MaximumAndMinimumKeepNan) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> a{1, nan, 3, -5}, b{2, 1, nan, -7}, c{0, 2, 9, -6};
  const void* in[3] = {a.data(), b.data(), c.data()};
  std::vector<float> highest(4), lowest(4);
  void* high[1] = {highest.data()};
  void* low[1] = {lowest.data()};
  reduce_slices(Number::kFloat32, Combine::kMax, in, 3, 0, 4, high, 1);
  reduce_slices(Number::kFloat32, Combine::kMin, in, 3, 0, 4, low, 1);
  EXPECT_EQ(highest[0], 2);
  EXPECT_TRUE(std::isnan(highest[1]) && std::isnan(highest[2]));
  EXPECT_EQ(highest[3], -5);
  EXPECT_EQ(lowest[0], 0);
  EXPECT_TRUE(std::isnan(lowest[1]) && std::isnan(lowest[2]));
  EXPECT_EQ(lowest[3], -7);
}

TEST(Reduce, IntegersWrap) {
  const std::int32_t a = std::numeric_limits<std::int32_t>::max(), b = 1;
  const std::int32_t* in[2] = {&a, &b};
  std::int32_t sum = 0;
  std::int32_t* out[1] = {&sum};
  sum_slices<std::int32_t>(in, 2, 0, 1, out, 1);
  EXPECT_EQ(sum, std::numeric_limits<std::int32_t>::min());
}

}  // namespace
}  // namespace isograd::kernels
