// The search for the smallest failing configuration, with predicates of its own.
#include "verify/run.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "base/files.hpp"
#include "isograd/error.hpp"
#include "train/task.hpp"
#include "train/trainer_testing.hpp"
#include "verify/layouts.hpp"

namespace isograd {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

RunConfig large() {
  RunConfig config;
  config.model.shape.layers = 12;
  config.model.shape.hidden = 384;
  config.model.shape.heads = 12;
  config.model.shape.key_value_heads = 4;
  config.model.shape.head_dim = 32;
  config.model.shape.feed_forward = 1000;
  config.batch.packs_per_step = 37;
  config.batch.packs_per_micro_batch = 2;
  config.data.pack_length = 500;
  config.parallel.strategy = "zero2";
  config.parallel.replicas = 2;
  return config;
}

TEST(Minimise, FindsTheSmallestOfEverything) {
  int asked = 0;
  const auto found = minimise({large(), 8}, [&](const Trial&) {
    ++asked;
    return std::string("always");
  });
  ASSERT_TRUE(found);
  EXPECT_EQ(found->tried, asked);
  const RunConfig& config = found->trial.config;
  EXPECT_EQ(found->trial.ranks, 1);
  EXPECT_EQ(config.model.shape.layers, 1);
  EXPECT_EQ(config.model.shape.hidden, 1);
  EXPECT_EQ(config.model.shape.heads, 1);
  EXPECT_EQ(config.model.shape.head_dim, 2);
  EXPECT_EQ(config.model.shape.feed_forward, 1);
  EXPECT_EQ(config.batch.packs_per_step, 1);
  EXPECT_EQ(config.data.pack_length, 2);
  EXPECT_EQ(config.parallel.strategy, "naive");
  EXPECT_EQ(config.parallel.replicas, 1);
  EXPECT_FALSE(config.parallel.overlap);
  EXPECT_THAT(found->changes, Contains("ranks 8 -> 1"));
  EXPECT_THAT(found->changes, Contains("model.layers 12 -> 1"));
}

TEST(Minimise, KeepsExactlyWhatTheFailureNeeds) {
  // Needs 5 packs a step at least, 3 ranks or more, 2 layers, zero2, more than one micro-batch and 17 tokens.
  const auto fails = [](const Trial& trial) -> std::string {
    const auto& batch = trial.config.batch;
    const bool failing = batch.packs_per_step >= 5 && trial.ranks >= 3 &&
                         trial.config.model.shape.layers >= 2 && trial.config.parallel.strategy == "zero2" &&
                         batch.packs_per_micro_batch * trial.ranks < batch.packs_per_step &&
                         trial.config.data.pack_length >= 17;
    return failing ? "planted" : "";
  };
  const auto found = minimise({large(), 8}, fails);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->failure, "planted");
  EXPECT_EQ(fails(found->trial), "planted");
  EXPECT_EQ(found->trial.ranks, 3);
  EXPECT_EQ(found->trial.config.batch.packs_per_step, 5);
  EXPECT_EQ(found->trial.config.model.shape.layers, 2);
  EXPECT_EQ(found->trial.config.data.pack_length, 17);
  EXPECT_EQ(found->trial.config.model.shape.hidden, 1);
  EXPECT_EQ(found->trial.config.parallel.strategy, "zero2");
  EXPECT_LT(found->tried, 200);
}

TEST(Minimise, NeverTakesAnotherFailureOrAnImpossibleConfiguration) {
  const auto fails = [](const Trial& trial) -> std::string {
    if (trial.config.model.shape.layers < 3)
      throw ConfigError({.where = "here", .found = "few", .expected = "many", .action = "Do"});
    return trial.config.model.shape.hidden < 100 ? "another" : "this";
  };
  const auto found = minimise({large(), 4}, fails);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->failure, "this");
  EXPECT_EQ(found->trial.config.model.shape.hidden, 100);
  EXPECT_EQ(found->trial.config.model.shape.layers, 3);
}

TEST(Minimise, HasNothingToDoWhereNothingFailsAndStopsWhenTold) {
  EXPECT_FALSE(minimise({large(), 4}, [](const Trial&) { return std::string(); }));
  int asked = 0;
  const auto found = minimise(
      {large(), 8},
      [&](const Trial&) {
        ++asked;
        return std::string("always");
      },
      7);
  ASSERT_TRUE(found);
  EXPECT_EQ(asked, 7);
  EXPECT_EQ(found->tried, 7);
}

TEST(Minimise, TheFileSaysTheSameAsTheTrial) {
  const auto found = minimise({large(), 8}, [](const Trial&) { return std::string("always"); });
  const std::string text = minimised_toml(*found, "small.toml");
  EXPECT_THAT(text, HasSubstr("isograd verify small.toml --ranks 1"));
  EXPECT_EQ(to_toml(parse_config(text, "small.toml")), to_toml(found->trial.config));
}

// ---- on real runs ----

}  // namespace
}  // namespace isograd
