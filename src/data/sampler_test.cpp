#include "isograd/data.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <set>

#include "base/error_testing.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

using Assign = SamplerOptions::Assign;

RC_GTEST_PROP(Sampler, GivesEverySampleOnceAnEpochWhateverTheRanks, ()) {
  SamplerOptions options;
  options.samples = *rc::gen::inRange<std::int64_t>(1, 60);
  options.samples_per_step = *rc::gen::inRange<std::int64_t>(1, 20);
  options.seed = *rc::gen::arbitrary<std::uint64_t>();
  options.shuffle = *rc::gen::arbitrary<bool>();
  options.assign = *rc::gen::element(Assign::kBlock, Assign::kStride);
  options.size = *rc::gen::inRange(1, 9);
  SamplerOptions alone = options;
  alone.size = 1;
  Sampler whole(alone);
  std::vector<Sampler> ranks;
  for (int rank = 0; rank < options.size; ++rank) {
    options.rank = rank;
    ranks.emplace_back(options);
  }
  for (int epoch = 0; epoch < 2; ++epoch) {
    std::multiset<std::int64_t> seen;
    for (std::int64_t step = 0; step < whole.steps_per_epoch(); ++step) {
      RC_ASSERT(whole.position().epoch == epoch);
      RC_ASSERT(whole.position().step == step);
      const auto together = whole.next();
      std::multiset<std::int64_t> assigned;
      std::size_t most = 0, fewest = together.size();
      for (Sampler& rank : ranks) {
        const auto part = rank.next();
        assigned.insert(part.begin(), part.end());
        most = std::max(most, part.size());
        fewest = std::min(fewest, part.size());
      }
      RC_ASSERT(assigned == std::multiset<std::int64_t>(together.begin(), together.end()));
      RC_ASSERT(most - fewest <= 1u);
      seen.insert(together.begin(), together.end());
    }
    RC_ASSERT(seen.size() == static_cast<std::size_t>(options.samples));
    RC_ASSERT(*seen.begin() == 0);
    RC_ASSERT(*seen.rbegin() == options.samples - 1);
    RC_ASSERT(std::set<std::int64_t>(seen.begin(), seen.end()).size() ==
              seen.size());  // B25: no sample twice
  }
}

TEST(Sampler, IsOneOfTorchDatasLoaders) {
  const SamplerOptions options{.samples = 7, .samples_per_step = 4, .rank = 1, .size = 3, .seed = 4};
  Sampler plain(options), ahead(options);
  plain.next(), ahead.next();
  LoaderSampler sampler(ahead);  // goes on from where it is
  sampler.reset();
  for (int step = 0; step < 4; ++step) {
    const auto own = plain.next();
    EXPECT_EQ(sampler.next(99), LoaderSampler::BatchRequestType(own.begin(), own.end()));
  }
  std::string errors;  // of the one rank of three that has none of two samples
  for (const int rank : {0, 1, 2}) {
    LoaderSampler few(Sampler({.samples = 7, .samples_per_step = 2, .rank = rank, .size = 3}));
    errors += error_testing::error_of([&] { few.next(2); }) + "\n";
  }
  EXPECT_THAT(errors, ::testing::AllOf(::testing::HasSubstr("no error\n"), ::testing::HasSubstr("drop_last"),
                                       ::testing::HasSubstr("no samples of step 0 of epoch 0")));
}

TEST(Sampler, ShufflesEachEpochAnewAndTheSameForAll) {
  SamplerOptions options{.samples = 50, .samples_per_step = 50, .seed = 4};
  Sampler a(options), b(options);
  const auto first = a.next(), second = a.next();
  EXPECT_NE(first, second);
  EXPECT_EQ(b.next(), first);
  options.seed = 5;
  EXPECT_NE(Sampler(options).next(), first);
}

TEST(Sampler, ContinuesInMidEpochOnAnotherNumberOfRanks) {
  SamplerOptions options{.samples = 23, .samples_per_step = 6, .seed = 1};
  Sampler straight(options);
  for (int i = 0; i < 5; ++i) straight.next();  // into the second epoch
  const auto position = straight.position();
  EXPECT_EQ(position.epoch, 1);
  EXPECT_EQ(position.step, 1);
  std::vector<std::int64_t> together;
  for (int rank = 0; rank < 3; ++rank) {
    SamplerOptions part = options;
    part.rank = rank;
    part.size = 3;
    Sampler resumed(part);
    resumed.seek(position);
    const auto mine = resumed.next();
    together.insert(together.end(), mine.begin(), mine.end());
  }
  EXPECT_EQ(together, straight.next());
}

TEST(Sampler, DropsTheLastShortStepOnlyIfAsked) {
  SamplerOptions options{.samples = 10, .samples_per_step = 4};
  EXPECT_EQ(Sampler(options).steps_per_epoch(), 3);
  options.drop_last = true;
  Sampler sampler(options);
  EXPECT_EQ(sampler.steps_per_epoch(), 2);
  sampler.next();
  sampler.next();
  EXPECT_EQ(sampler.position().epoch, 1);
}

TEST(Sampler, RefusesWhatCannotBe) {
  EXPECT_THROW(Sampler({.samples = 0}), ConfigError);
  EXPECT_THROW(Sampler({.samples = 3, .samples_per_step = 0}), ConfigError);
  EXPECT_THROW(Sampler({.samples = 3, .rank = 2, .size = 2}), ConfigError);
  EXPECT_THROW(Sampler({.samples = 3, .samples_per_step = 4, .drop_last = true}), ConfigError);
  Sampler sampler({.samples = 3});
  EXPECT_THROW(sampler.seek({.epoch = 0, .step = 3}), ConfigError);
}

}  // namespace
}  // namespace isograd
