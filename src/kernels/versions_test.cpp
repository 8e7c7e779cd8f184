// Every version that this processor can run gives the same bits.
#include "kernels/versions.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "isograd/error.hpp"
#include "kernels/attention.hpp"
#include "kernels/flat.hpp"
#include "kernels/naive_testing.hpp"
#include "kernels/reduce.hpp"
#include "kernels/softmax.hpp"

#if defined(__x86_64__) && defined(__GNUC__)
namespace isograd::kernels {
namespace {

using naive::random_values;

// `run` must return the same bytes at every level from 0 to this processor's.
void expect_same_bytes(const std::function<std::string()>& run) {
  const int best = processor_level();
  processor_level() = 0;
  const std::string expected = run();
  for (int level = 1; level <= best; ++level) {
    processor_level() = level;
    EXPECT_TRUE(run() == expected) << "level " << level;
  }
  processor_level() = best;
}

template <typename T>
void append(std::string& bytes, const std::vector<T>& values) {
  bytes.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

template <typename T>
class Versions : public ::testing::Test {};
using Types = ::testing::Types<float, double>;
TYPED_TEST_SUITE(Versions, Types);

TYPED_TEST(Versions, OfFlatPassesGiveTheSameBits) {
  using T = TypeParam;
  for (std::int64_t count : {5, 64, 1037})
    expect_same_bytes([&] {
      auto g = random_values<T>(count, 1), p = random_values<T>(count, 2), m = random_values<T>(count, 3),
           v = random_values<T>(count, 4), b = random_values<T>(count, 5);
      for (T& x : v) x *= x;
      const double norm = squared_norm(g.data(), count);
      adamw({.gradient_scale = 0.3, .keep = 0.99, .step_size = 0.01, .inverse_root_correction = 1.3},
            g.data(), p.data(), m.data(), v.data(), nullptr, count);
      const Sgd scalars{.gradient_scale = 0.3, .learning_rate = 0.1, .momentum = 0.9, .weight_decay = 0.01};
      sgd(scalars, g.data(), p.data(), b.data(), nullptr, count);
      std::string bytes;
      append(bytes, std::vector<double>{norm});
      for (auto* values : {&p, &m, &v, &b}) append(bytes, *values);
      return bytes;
    });
}

TYPED_TEST(Versions, OfSumsGiveTheSameBits) {
  using T = TypeParam;
  constexpr int kMost = 5;
  const std::int64_t count = 1037;
  for (int inputs = 2; inputs <= kMost; ++inputs)
    for (int outputs : {1, inputs, inputs + 1})
      expect_same_bytes([&] {
        std::vector<std::vector<T>> values, sums(static_cast<std::size_t>(outputs), std::vector<T>(count));
        std::vector<const void*> in;
        std::vector<void*> out;
        for (int k = 0; k < inputs; ++k)
          values.push_back(random_values<T>(count, 20 + static_cast<unsigned>(k)));
        for (const auto& value : values) in.push_back(value.data());
        for (auto& sum : sums) out.push_back(sum.data());
        reduce_slices(std::is_same_v<T, float> ? Number::kFloat32 : Number::kFloat64, Combine::kSum,
                      in.data(), inputs, 1, count - 2, out.data(), outputs);
        std::string bytes;
        for (const auto& sum : sums) append(bytes, sum);
        return bytes;
      });
}

template <typename T>
void check_buffers() {
  for (std::int64_t count : {5, 64, 1037})
    expect_same_bytes([&] {
      auto values = random_values<T>(count, 8);
      std::string bytes;
      append(bytes, std::vector<double>{squared_norm(values.data(), count), max_abs(values.data(), count)});
      return bytes;
    });
}

TYPED_TEST(Versions, OfPassesOverABufferGiveTheSameBits) { check_buffers<TypeParam>(); }

TEST(VersionsBfloat16, OfFlatPassesGiveTheSameBits) {
  check_buffers<Bfloat16>();
  for (std::int64_t count : {5, 64, 1037})
    expect_same_bytes([&] {
      const auto g = random_values<Bfloat16>(count, 1);
      auto p = random_values<float>(count, 2), m = random_values<float>(count, 3),
           v = random_values<float>(count, 4), b = random_values<float>(count, 5);
      for (float& x : v) x *= x;
      std::vector<Bfloat16> rounded(count);
      adamw({.gradient_scale = 0.3, .keep = 0.99, .step_size = 0.01}, g.data(), p.data(), m.data(), v.data(),
            rounded.data(), count);
      sgd({.gradient_scale = 0.3, .learning_rate = 0.1, .momentum = 0.9}, g.data(), p.data(), b.data(),
          rounded.data(), count);
      std::string bytes;
      for (auto* values : {&p, &m, &v, &b}) append(bytes, *values);
      append(bytes, rounded);
      return bytes;
    });
}

template <typename T>
void check_softmax() {
  const std::int64_t rows = 3, vocabulary = 1300 + 7;
  expect_same_bytes([&] {
    const auto logits = random_values<T>(rows * vocabulary, 6);
    const bool mask[rows] = {true, true, false};
    const std::int64_t targets[rows] = {0, vocabulary - 1, -100};
    std::vector<RowSum> sums(rows);
    std::vector<T> gradient(logits.size());
    row_sums(logits.data(), rows, vocabulary, mask, sums.data());
    std::string bytes;
    append(bytes, sums);
    const std::vector<RowGradient> of(rows,
                                      {.maximum = 30, .factor = 0.3, .uniform = 1e-3, .at_target = 0.7});
    softmax_gradient(logits.data(), rows, vocabulary, mask, targets, of.data(), gradient.data());
    append(bytes, gradient);
    std::vector<double> totals(rows);
    logit_sums(logits.data(), rows, vocabulary, mask, totals.data());
    append(bytes, totals);
    return bytes;
  });
}

TYPED_TEST(Versions, OfSoftmaxGiveTheSameBits) { check_softmax<TypeParam>(); }
TEST(VersionsBfloat16, OfSoftmaxGiveTheSameBits) { check_softmax<Bfloat16>(); }

TEST(VersionsAttention, OfBlocksOfScoresGiveTheSameBits) {
  constexpr std::int64_t kRows = 3, kStride = 128, kKeys = 101, kQueries = 64;
  expect_same_bytes([&] {
    auto scores = random_values<float>(kRows * kStride, 31),
         weights = random_values<float>(kKeys * kQueries, 32),
         dweights = random_values<float>(kKeys * kQueries, 33);
    const auto mean = random_values<float>(kQueries, 34);
    const std::vector<float> log_sums(kQueries, 20);
    std::vector<float> max(kRows, -std::numeric_limits<float>::infinity()), sum(kRows, 0), factor(kRows);
    attention_weights(scores.data(), kStride, kRows, kKeys, kStride, 70, 0.3f, max.data(), sum.data(),
                      factor.data());
    attention_weights_backward(weights.data(), dweights.data(), kKeys, kQueries, 5, 0.3f, log_sums.data(),
                               mean.data());
    std::string bytes;
    for (const auto* values : {&scores, &max, &sum, &factor, &weights, &dweights}) append(bytes, *values);
    return bytes;
  });
}

}  // namespace
}  // namespace isograd::kernels
#endif

namespace isograd::kernels {
namespace {

// The variable is read once, at the first kernel of a process, so each answer needs its own process.
void say_level(const char* variable) {
  setenv("ISOGRAD_PROCESSOR", variable, 1);
  try {
    std::fprintf(stderr, "level %d\n", processor_level());
  } catch (const ConfigError& error) {
    std::fprintf(stderr, "%s\n", error.what());
    std::exit(exit_status(error));
  }
  std::exit(0);
}

TEST(LevelsDeathTest, TheVariableLowersTheLevelAndNeverRaisesIt) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(say_level("scalar"), testing::ExitedWithCode(0), "level 0");
  EXPECT_EXIT(say_level("sse9"), testing::ExitedWithCode(2), "sse9.*scalar, avx2 or avx512");
#if !defined(__x86_64__)
  EXPECT_EXIT(say_level("avx2"), testing::ExitedWithCode(2), "avx2 on a processor of level scalar");
#endif
}

// Under `tests/processors.py LEVEL` the kernels use that level.
TEST(Levels, AreThoseOfTheVariable) {
  const char* variable = std::getenv("ISOGRAD_PROCESSOR");
  if (!variable) return;
  const int expected = std::string(variable) == "avx512" ? 2 : std::string(variable) == "avx2" ? 1 : 0;
  EXPECT_EQ(processor_level(), expected);
}

}  // namespace
}  // namespace isograd::kernels
