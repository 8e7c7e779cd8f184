// Assigning videos to ranks: every video once, the same set for any number of ranks, balanced.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <numeric>
#include <set>

#include "data/test_support.hpp"
#include "data/video_testing.hpp"
#include "isograd/data.hpp"

namespace isograd {
namespace {

using testing::config_error;
using ::testing::HasSubstr;
using testing::numbered_frames;

constexpr int kRanks[] = {1, 2, 3, 4, 5, 8};

// Videos with these numbers of frames and one token per pixel: 3 · frames · wide tokens.
std::shared_ptr<const VideoStore> store_of(const std::vector<int>& frames) {
  std::vector<at::Tensor> videos;
  for (std::size_t i = 0; i < frames.size(); ++i)
    videos.push_back(
        numbered_frames(frames[i], 3, 1 + static_cast<std::int64_t>(i % 2), static_cast<int>(i)));
  return VideoStore::from_frames(videos, {1, 1, 1});
}

std::vector<std::int64_t> all_of(const VideoStore& store) {
  std::vector<std::int64_t> videos(static_cast<std::size_t>(store.num_videos()));
  std::iota(videos.begin(), videos.end(), std::int64_t{0});
  return videos;
}

void check_batch(const VideoStore& store, const Batch& batch, std::int64_t most, std::int64_t draw) {
  RC_ASSERT(batch.num_tokens() == batch.tokens.numel());
  RC_ASSERT(at::equal(batch.tokens, batch.targets));
  RC_ASSERT(batch.num_targets() == batch.num_tokens());
  RC_ASSERT(batch.num_fragments() >= 1);
  RC_ASSERT(batch.num_tokens() <= most || batch.num_fragments() == 1);
  RC_ASSERT(batch.draw == draw);
  for (std::size_t f = 0; f < batch.sample_ids.size(); ++f) {
    const std::int64_t video = batch.sample_ids[f], length = store.num_tokens(video);
    RC_ASSERT(batch.cu_seqlens[f + 1] - batch.cu_seqlens[f] == length);
    RC_ASSERT(batch.sample_targets[f] == length);
    const at::Tensor positions = at::arange(length);
    RC_ASSERT(at::equal(batch.positions.slice(0, batch.cu_seqlens[f], batch.cu_seqlens[f + 1]), positions));
    RC_ASSERT(at::equal(batch.tokens.slice(0, batch.cu_seqlens[f], batch.cu_seqlens[f + 1]),
                        positions + store.first_token(video)));
  }
}

RC_GTEST_PROP(VideoLoader, AssignsEveryVideoOnceInEveryLayout, ()) {
  const auto frames = *rc::gen::nonEmpty(rc::gen::container<std::vector<int>>(rc::gen::inRange(1, 12)));
  const auto store = store_of(frames);
  VideoLoaderOptions options;
  options.videos_per_step = *rc::gen::inRange(1, 9);
  options.tokens_per_micro_batch = *rc::gen::inRange(1, 80);
  options.seed = *rc::gen::arbitrary<std::uint64_t>();
  VideoLoader alone(store, all_of(*store), options);
  const std::int64_t steps = alone.steps_per_epoch();
  for (const int size : kRanks) {
    std::vector<VideoLoader> loaders;
    options.size = size;
    for (options.rank = 0; options.rank < size; ++options.rank)
      loaders.emplace_back(store, all_of(*store), options);
    for (std::int64_t epoch = 0; epoch < 2; ++epoch) {
      std::multiset<std::int64_t> seen;
      for (std::int64_t step = 0; step < steps; ++step) {
        std::multiset<std::int64_t> in_step, expected;
        for (const Batch& batch : alone.whole_step({epoch, step})) {
          check_batch(*store, batch, 1, epoch * steps + step);
          expected.insert(batch.sample_ids.begin(), batch.sample_ids.end());
        }
        double total = 0, most = 0, longest = 0;
        for (VideoLoader& loader : loaders) {
          RC_ASSERT(loader.position().epoch == epoch && loader.position().step == step);
          double cost = 0;
          for (const Batch& batch : loader.next()) {
            check_batch(*store, batch, options.tokens_per_micro_batch, epoch * steps + step);
            in_step.insert(batch.sample_ids.begin(), batch.sample_ids.end());
            for (const std::int64_t video : batch.sample_ids) {
              const double scores = std::pow(static_cast<double>(store->num_tokens(video)), 2);
              cost += scores, longest = std::max(longest, scores);
            }
          }
          total += cost, most = std::max(most, cost);
        }
        RC_ASSERT(in_step == expected);
        // Longest first, to the rank with the least: before its last video a rank was at or below the mean
        // (Graham 1969).
        RC_ASSERT(most <= (total - longest) / size + longest + 1e-6);
        seen.insert(in_step.begin(), in_step.end());
      }
      const auto each = all_of(*store);
      RC_ASSERT(seen == std::multiset<std::int64_t>(each.begin(), each.end()));
    }
  }
}

RC_GTEST_PROP(VideoLoader, GoesOnWhereItStood, ()) {
  const auto store = store_of({3, 1, 4, 1, 5, 9, 2, 6, 5});
  const VideoLoaderOptions options{
      .videos_per_step = 4, .tokens_per_micro_batch = 30, .seed = 7, .rank = 1, .size = 3};
  VideoLoader one(store, all_of(*store), options), two(store, all_of(*store), options);
  const int skip = *rc::gen::inRange(0, 10);
  for (int i = 0; i < skip; ++i) one.next();
  two.seek(one.position());
  for (int i = 0; i < 5; ++i) {
    const MicroBatches a = one.next(), b = two.next();
    RC_ASSERT(a.size() == b.size());
    for (std::size_t j = 0; j < a.size(); ++j) {
      RC_ASSERT(at::equal(a[j].tokens, b[j].tokens) && a[j].sample_ids == b[j].sample_ids);
      RC_ASSERT(a[j].draw == b[j].draw);
    }
  }
}

std::vector<std::int64_t> order_of(VideoLoader loader, std::int64_t epoch) {
  std::vector<std::int64_t> order;
  for (std::int64_t step = 0; step < loader.steps_per_epoch(); ++step)
    for (const Batch& batch : loader.whole_step({epoch, step})) order.push_back(batch.sample_ids[0]);
  return order;
}

TEST(VideoLoader, TheOrderFollowsSeedAndEpoch) {
  const auto store = store_of(std::vector<int>(20, 2));
  const auto with = [&](std::uint64_t seed, bool shuffle) {
    return VideoLoader(store, all_of(*store), {.videos_per_step = 3, .seed = seed, .shuffle = shuffle});
  };
  EXPECT_EQ(order_of(with(1, true), 0), order_of(with(1, true), 0));
  EXPECT_NE(order_of(with(1, true), 0), order_of(with(1, true), 1));
  EXPECT_NE(order_of(with(1, true), 0), order_of(with(2, true), 0));
  EXPECT_EQ(order_of(with(1, false), 3), all_of(*store));
  EXPECT_EQ(order_of(VideoLoader(store, {5, 2}, {.shuffle = false}), 0), (std::vector<std::int64_t>{5, 2}));
}

TEST(VideoLoader, BadOptionsAreNamed) {
  const auto store = store_of({2, 2});
  const auto error = [&](std::vector<std::int64_t> videos, VideoLoaderOptions options) {
    return config_error([&] { VideoLoader(store, std::move(videos), options); });
  };
  EXPECT_THAT(error({}, {}), HasSubstr("no videos"));
  EXPECT_THAT(error({0, 0}, {}), HasSubstr("twice"));
  EXPECT_THAT(error({2}, {}), HasSubstr("video"));
  EXPECT_THAT(error({0}, {.videos_per_step = 0}), HasSubstr("videos_per_step"));
  EXPECT_THAT(error({0}, {.tokens_per_micro_batch = 0}), HasSubstr("tokens_per_micro_batch"));
  EXPECT_THAT(error({0}, {.rank = 2, .size = 2}), HasSubstr("rank"));
  VideoLoader loader(store, {0, 1}, {});
  EXPECT_THAT(config_error([&] { loader.seek({0, 1}); }), HasSubstr("step 1 of epoch 0"));
  EXPECT_THAT(config_error([&] { loader.whole_step({-1, 0}); }), HasSubstr("epoch -1"));
}

}  // namespace
}  // namespace isograd
