// Whole tensors out of shards: each is right wherever shards end, and no rank has more than one at a time.
#include "train/whole_tensors.hpp"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "isograd/fully_shard.hpp"
#include "isograd/world.hpp"
#include "layout/cost/meter.hpp"

namespace isograd {
namespace {

constexpr std::int64_t kParameters = 12, kMost = 1 << 15;  // elements of the largest

// Sizes of which no number of ranks divides all.
std::vector<std::pair<std::string, at::Tensor>> model() {
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (std::int64_t i = 0; i < kParameters; ++i)
    named.emplace_back(std::string(1, static_cast<char>('a' + i)),
                       at::arange(kMost - 97 * i, at::kDouble).add_(0.5 + i).requires_grad_());
  return named;
}

struct Taken {
  std::int64_t before = 0, most = 0;  // bytes of this rank
  std::vector<at::Tensor> tensors{};  // rank 0's
};

// Parameters and one state of each, all in one bucket of `ranks` shards.
Taken take(World& world, bool keep) {
  MemoryMeter meter;
  const auto layout = bucketed(
      trainable_parameters(model()), world.group,
      {.stage = 2, .share_parameters = false, .bucket_bytes = 1 << 30, .first_bucket_bytes = 1 << 30});
  EXPECT_EQ(layout->buckets().size(), 1u);
  const Bucket& bucket = layout->buckets()[0];
  Taken taken;
  WholeTensors parameters = WholeTensors::parameters(*layout, nullptr);
  WholeTensors states(*layout, {{"twice", {bucket.parameters * 2}}}, nullptr);
  at::Tensor warm = at::zeros({8}, at::kDouble);  // a group's own memory is no part of it
  world.group.broadcast(warm, 0);
  taken.before = meter.alive();
  meter.restart_peak();
  for (WholeTensors* all : {&parameters, &states}) {
    if (world.rank > 0)
      all->drain();
    else
      all->stream().each([&](const at::Tensor& tensor) {
        if (keep) taken.tensors.push_back(tensor.clone());
      });
  }
  taken.most = meter.peak();
  return taken;
}

TEST(WholeTensors, AreRightWhereverShardsEnd) {
  MemoryMeter::install();
  for (const int ranks : {1, 2, 3, 5, 8})
    run_ranks(ranks, [&](World& world) {
      const Taken taken = take(world, true);
      if (world.rank > 0) return;
      const auto expected = model();
      ASSERT_EQ(taken.tensors.size(), 2 * expected.size());
      for (std::size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(taken.tensors[i].equal(expected[i].second)) << ranks << " ranks, " << expected[i].first;
        EXPECT_TRUE(taken.tensors[expected.size() + i].equal(expected[i].second * 2)) << ranks << " ranks";
      }
    });
}

// A rank needs no memory for its own shards, which it has anyway. A bucket that is gathered whole would
// take twelve.
TEST(WholeTensors, OneParameterAtATime) {
  MemoryMeter::install();
  constexpr std::int64_t kBytes = kMost * 8, kSlack = kBytes / 8;
  for (const int ranks : {2, 3, 8})
    run_ranks(ranks, [&](World& world) {
      const Taken taken = take(world, false);
      EXPECT_LE(taken.most - taken.before, kBytes + kSlack) << ranks << " ranks, rank " << world.rank;
      EXPECT_GE(taken.most - taken.before, kBytes) << "nothing was measured";
      const auto layout = bucketed(trainable_parameters(model()), world.group,
                                   {.stage = 2, .share_parameters = false, .bucket_bytes = 1 << 30});
      MemoryMeter meter;
      layout->gather_whole(layout->buckets()[0], layout->buckets()[0].parameters);
      EXPECT_GT(meter.peak(), 2 * kBytes);
    });
}

}  // namespace
}  // namespace isograd
