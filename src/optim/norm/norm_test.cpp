#include "isograd/optimizer.hpp"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "isograd/error.hpp"
#include "optim/norm/norm.hpp"

namespace isograd {
namespace {

std::vector<Bucket> random_buckets(at::ScalarType type, int rank, int size) {
  at::manual_seed(5);
  std::vector<Bucket> buckets;
  for (std::int64_t numel : {1, 200000, 37}) {
    Bucket bucket;
    bucket.gradients = at::randn({numel}, type);
    bucket.owned = owned_slice(numel, rank, size);
    buckets.push_back(std::move(bucket));
  }
  return buckets;
}

TEST(GlobalNorm, IsThatOfAllBuckets) {
  for (auto type : {at::kFloat, at::kDouble}) {
    auto buckets = random_buckets(type, 0, 1);
    double squares = 0;
    for (auto& bucket : buckets) squares += bucket.gradients.to(at::kDouble).square().sum().item<double>();
    Group alone = Group::solo();
    const GlobalNorm result = global_norm(buckets, 2.5, alone);
    EXPECT_NEAR(result.norm, std::sqrt(squares), std::sqrt(squares) * 2e5 * 0x1p-53);
    EXPECT_EQ(result.loss_sum, 2.5);
    EXPECT_TRUE(result.finite);
  }
}

// The code for other devices, run on the CPU. It sums in another order: n roundings of fp64 at most.
TEST(ByLibTorch, EqualsThePassesOfTheCpu) {
  for (auto type : {at::kFloat, at::kDouble, at::kBFloat16}) {
    auto buckets = random_buckets(type, 1, 3);
    for (auto& bucket : buckets) {
      const Range range = owned_part(bucket);
      const double wanted = squared_norm(bucket.gradients, range);
      EXPECT_NEAR(by_libtorch::squared_norm(bucket.gradients, range), wanted,
                  wanted * static_cast<double>(range.size()) * 0x1p-53);
      EXPECT_EQ(by_libtorch::max_abs(bucket.gradients, range), max_abs(bucket.gradients, range));
      if (range.size() == 0) continue;
      bucket.gradients[range.begin] = std::nan("");
      EXPECT_TRUE(std::isnan(by_libtorch::max_abs(bucket.gradients, range)));
    }
  }
}

// Parameters before, across and behind what a rank owns: both implementations find each element at one
// owner.
TEST(OwnedPart, OfAParameterMayBeEmptyAnywhere) {
  at::manual_seed(5);
  const at::Tensor whole = at::randn({120}, at::kDouble);
  const std::vector<Slot> slots = {{.name = "a", .offset = 0, .numel = 10, .shape = {10}},
                                   {.name = "b", .offset = 10, .numel = 0, .shape = {0}},
                                   {.name = "c", .offset = 32, .numel = 41, .shape = {41}},
                                   {.name = "d", .offset = 96, .numel = 24, .shape = {24}}};
  for (const bool holds_all : {false, true})
    for (const int size : {1, 2, 3, 4, 5, 8})
      for (const Slot& slot : slots) {
        const at::Tensor mine = whole.narrow(0, slot.offset, slot.numel);
        double squares[2] = {0, 0}, largest[2] = {0, 0};
        std::int64_t owned = 0;
        for (int rank = 0; rank <= size; ++rank) {  // the last one owns nothing, as a further replica
          Bucket bucket;
          bucket.owned = owned_slice(whole.numel(), std::min(rank, size - 1), size);
          bucket.held = holds_all ? Range{0, whole.numel()} : bucket.owned;
          if (rank == size) bucket.owned.end = bucket.owned.begin;
          bucket.gradients = whole.narrow(0, bucket.held.begin, bucket.held.size());
          const Range part = owned_part(bucket, slot);
          EXPECT_LE(0, part.begin);
          EXPECT_LE(part.begin, part.end);
          EXPECT_LE(part.end, bucket.held.size());
          owned += part.size();
          squares[0] += squared_norm(bucket.gradients, part);
          squares[1] += by_libtorch::squared_norm(bucket.gradients, part);
          largest[0] = std::max(largest[0], max_abs(bucket.gradients, part));
          largest[1] = std::max(largest[1], by_libtorch::max_abs(bucket.gradients, part));
        }
        EXPECT_EQ(owned, slot.numel) << slot.name << " " << size;
        const double wanted = mine.square().sum().item<double>();
        for (const double found : squares) EXPECT_NEAR(found, wanted, wanted * 60 * 0x1p-53) << slot.name;
        for (const double found : largest)
          EXPECT_EQ(found, slot.numel > 0 ? mine.abs().max().item<double>() : 0) << slot.name;
      }
}

// The owners' parts add up to the whole: each element has one owner (B18a counts some twice, B18b misses
// some).
TEST(GlobalNorm, OwnedPartsAddUpToTheWhole) {
  for (int size : {2, 3, 4, 5, 8}) {
    Group alone = Group::solo();
    auto whole = random_buckets(at::kDouble, 0, 1);
    const double expected = std::pow(global_norm(whole, 0, alone).norm, 2);
    double sum = 0, largest = 0;
    for (int rank = 0; rank < size; ++rank) {
      auto part = random_buckets(at::kDouble, rank, size);
      const double square = std::pow(global_norm(part, 0, alone).norm, 2);
      sum += square;
      largest = std::max(largest, square);
    }
    EXPECT_NEAR(sum, expected, expected * 1e-12);
    EXPECT_LT(largest, 0.9 * expected);
  }
}

TEST(GlobalNorm, ReportsWhatIsNotFinite) {
  Group alone = Group::solo();
  for (double bad : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
    auto buckets = random_buckets(at::kFloat, 0, 1);
    EXPECT_FALSE(global_norm(buckets, bad, alone).finite);
    buckets[1].gradients[150000] = bad;
    EXPECT_FALSE(global_norm(buckets, 0, alone).finite);
  }
  std::vector<double> sums = {0.5, std::nan(""), HUGE_VAL};  // the loss, and what is only logged
  const GlobalNorm result = global_norm(1.0, sums, alone);
  EXPECT_TRUE(result.finite);
  EXPECT_TRUE(std::isnan(sums[1]));
  auto buckets = random_buckets(at::kFloat, 0, 1);
  buckets[1].gradients.fill_(3e38f);  // large, yet finite: fp64 squares do not overflow
  EXPECT_TRUE(global_norm(buckets, 0, alone).finite);
}

TEST(ClipCoefficient, FollowsItsFormula) {
  EXPECT_EQ(clip_coefficient(0.5, 1), 1);
  EXPECT_EQ(clip_coefficient(0, 1), 1);
  EXPECT_EQ(clip_coefficient(4, 1), 1 / (4 + 1e-6));
  EXPECT_EQ(clip_coefficient(4, 0), 1);
  EXPECT_EQ(clip_coefficient(4, -1), 1);
  EXPECT_THROW(clip_coefficient(4, std::nan("")), ConfigError) << "it would switch clipping off";
}

}  // namespace
}  // namespace isograd
