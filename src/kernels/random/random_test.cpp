#include "isograd/random.hpp"

#include <Random123/philox.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <set>

namespace isograd {
namespace {

using Words = std::array<std::uint64_t, 4>;

// An independent Philox4x64-10, from the paper (Salmon et al., SC 2011, section 3.3).
Words philox(Words counter, std::array<std::uint64_t, 2> key) {
  __extension__ typedef unsigned __int128 Wide;
  for (int round = 0; round < 10; ++round) {
    const Wide a = static_cast<Wide>(0xD2E7470EE14C6C93ull) * counter[0];
    const Wide b = static_cast<Wide>(0xCA5A826395121157ull) * counter[2];
    counter = {static_cast<std::uint64_t>(b >> 64) ^ counter[1] ^ key[0], static_cast<std::uint64_t>(b),
               static_cast<std::uint64_t>(a >> 64) ^ counter[3] ^ key[1], static_cast<std::uint64_t>(a)};
    key = {key[0] + 0x9E3779B97F4A7C15ull, key[1] + 0xBB67AE8584CAA73Bull};
  }
  return counter;
}

struct KnownAnswer {
  Words counter;
  std::array<std::uint64_t, 2> key;
  Words expected;
};

// The three lines "philox4x64 10" of kat_vectors, published with Random123.
constexpr std::uint64_t kOnes = ~std::uint64_t{0};
const KnownAnswer kKnownAnswers[] = {
    {{0, 0, 0, 0}, {0, 0}, {0x16554d9eca36314c, 0xdb20fe9d672d0fdc, 0xd7e772cee186176b, 0x7e68b68aec7ba23b}},
    {{kOnes, kOnes, kOnes, kOnes},
     {kOnes, kOnes},
     {0x87b092c3013fe90b, 0x438c3c67be8d0224, 0x9cc7d7c69cd777b6, 0xa09caebf594f0ba0}},
    {{0x243f6a8885a308d3, 0x13198a2e03707344, 0xa4093822299f31d0, 0x082efa98ec4e6c89},
     {0x452821e638d01377, 0xbe5466cf34e90c6c},
     {0xa528f45403e61d95, 0x38c72dbd566e9788, 0xa5a1610e72fd18b5, 0x57bd43b5e52b7fe6}}};

TEST(Random, PhiloxGivesThePublishedAnswers) {
  for (const auto& answer : kKnownAnswers) {
    EXPECT_EQ(philox(answer.counter, answer.key), answer.expected);
    const r123::Philox4x64::ctr_type counter = {
        {answer.counter[0], answer.counter[1], answer.counter[2], answer.counter[3]}};
    const auto library = r123::Philox4x64()(counter, {{answer.key[0], answer.key[1]}});
    EXPECT_TRUE(std::equal(library.begin(), library.end(), answer.expected.begin()));
  }
  EXPECT_EQ(random_bits({}, 0), kKnownAnswers[0].expected[0]);
}

RC_GTEST_PROP(Random, BitsAreThePhiloxBlockOfTheirKey, (std::array<std::uint64_t, 5> w)) {
  const RandomKey key{.seed = w[0], .step = w[1], .sample = w[2], .layer = w[3]};
  RC_ASSERT(random_bits(key, w[4]) == philox({w[4], w[1], w[2], 0}, {w[0], w[3]})[0]);
  const double uniform = random_uniform(key, w[4]);
  RC_ASSERT(uniform >= 0 && uniform < 1);
  RC_ASSERT(std::isfinite(random_normal(key, w[4])));
}

TEST(Random, EveryPartOfTheKeyChangesTheNumbers) {
  const RandomKey base{.seed = 1, .step = 2, .sample = 3, .layer = 4};
  std::set<std::uint64_t> seen{random_bits(base, 5), random_bits(base, 6)};
  for (auto part : {&RandomKey::seed, &RandomKey::step, &RandomKey::sample, &RandomKey::layer}) {
    RandomKey other = base;
    ++(other.*part);
    seen.insert(random_bits(other, 5));
  }
  EXPECT_EQ(seen.size(), 6u);
}

TEST(Random, NamesHashByFnv1a) {
  // The test values of the FNV authors (www.isthe.com/chongo/tech/comp/fnv).
  EXPECT_EQ(hash_name(""), 0xcbf29ce484222325ull);
  EXPECT_EQ(hash_name("a"), 0xaf63dc4c8601ec8cull);
  EXPECT_EQ(hash_name("foobar"), 0x85944171f73967e8ull);
}

// n draws. The mean of k-th powers must be within five standard errors of its expectation. The key is fixed,
// so the outcome never changes, and a wrong distribution misses the bound by far.
TEST(Random, UniformAndNormalHaveTheirMoments) {
  const int n = 200000;
  const RandomKey key{.seed = 7, .layer = hash_name("moments")};
  std::array<double, 3> uniform{}, normal{};
  for (int i = 0; i < n; ++i) {
    const double u = random_uniform(key, i), z = random_normal(key, i);
    uniform[0] += u, uniform[1] += u * u;
    normal[0] += z, normal[1] += z * z, normal[2] += z * z * z * z;
  }
  EXPECT_NEAR(uniform[0] / n, 1.0 / 2, 5 * std::sqrt(1.0 / 12 / n));
  EXPECT_NEAR(uniform[1] / n, 1.0 / 3, 5 * std::sqrt(4.0 / 45 / n));
  EXPECT_NEAR(normal[0] / n, 0.0, 5 * std::sqrt(1.0 / n));
  EXPECT_NEAR(normal[1] / n, 1.0, 5 * std::sqrt(2.0 / n));
  EXPECT_NEAR(normal[2] / n, 3.0, 5 * std::sqrt(96.0 / n));
}

RC_GTEST_PROP(Random, APermutationHoldsEachNumberOnce, (std::uint64_t seed)) {
  const auto n = *rc::gen::inRange<std::int64_t>(0, 400);
  const auto order = random_permutation(n, {.seed = seed});
  std::vector<std::int64_t> sorted = order, expected(static_cast<std::size_t>(n));
  std::sort(sorted.begin(), sorted.end());
  std::iota(expected.begin(), expected.end(), 0);
  RC_ASSERT(sorted == expected);
  RC_ASSERT(order == random_permutation(n, {.seed = seed}));
}

TEST(Random, AllPermutationsAreEquallyLikely) {
  std::array<int, 24> seen{};
  const int draws = 24000;
  for (int i = 0; i < draws; ++i) {
    const auto order = random_permutation(4, {.seed = 11, .step = static_cast<std::uint64_t>(i)});
    int rank = 0;
    for (int a = 0; a < 4; ++a) {
      int smaller = 0;
      for (int b = a + 1; b < 4; ++b) smaller += order[b] < order[a];
      rank = rank * (4 - a) + smaller;
    }
    ++seen[rank];
  }
  double chi_squared = 0;
  for (int count : seen) chi_squared += (count - draws / 24.0) * (count - draws / 24.0) / (draws / 24.0);
  EXPECT_LT(chi_squared, 58.6);  // 23 degrees of freedom: one of 16000 fair generators exceeds it
}

}  // namespace
}  // namespace isograd
