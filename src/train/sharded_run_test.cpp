// Whole training runs with parameters sharded: what is trained, measured, sampled and saved is what one
// process has, and a checkpoint of one layout continues in another.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "train/trainer_testing.hpp"

namespace isograd {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class ShardedRun : public testing_runs::TinyRuns {
 protected:
  RunConfig zero3(const std::string& name, bool share = false) const {
    RunConfig config = tiny(name, "float64");
    config.model.shape.layers = 3;
    config.parallel.strategy = "zero3";
    config.parallel.share_parameters = share ? "on" : "off";
    config.sample.tokens = 12;
    return config;
  }
  RunConfig plain(const std::string& name) const {
    RunConfig config = zero3(name);
    config.parallel.strategy = "bucketed";
    return config;
  }
  static void expect_same(const Run& found, const Run& expected, std::size_t skip, const std::string& where) {
    ASSERT_EQ(found.steps.size() + skip, expected.steps.size()) << where;
    for (std::size_t i = 0; i < found.steps.size(); ++i) {
      const StepReport &a = found.steps[i].report, &b = expected.steps[i + skip].report;
      EXPECT_EQ(a.census.targets, b.census.targets) << where;
      EXPECT_NEAR(a.loss, b.loss, 1e-9 * std::abs(b.loss)) << where << ", step " << i;
      EXPECT_NEAR(a.norm, b.norm, 1e-9 * std::abs(b.norm)) << where << ", step " << i;
    }
    EXPECT_NEAR(*found.outcomes[0].validation_loss, *expected.outcomes[0].validation_loss, 1e-9) << where;
    EXPECT_EQ(found.outcomes[0].sample, expected.outcomes[0].sample) << where;
  }
};

TEST_F(ShardedRun, IsTheRunOfOneProcess) {
  const Run alone = run(plain("alone"), 1);
  EXPECT_GT(std::abs(alone.steps[0].report.loss - alone.steps[6].report.loss), 1e-3);
  for (int ranks : {1, 2, 3, 5})
    for (const char* policy : {"default", "shared", "checkpoint", "kept", "once"}) {
      const std::string kind = policy;
      if (kind == "shared" && ranks == 1) continue;  // no rank to share with: refused
      RunConfig config = zero3(kind + std::to_string(ranks), kind == "shared");
      config.parallel.checkpoint_activations = kind == "checkpoint";
      config.parallel.reshard_after_forward = kind != "kept";
      config.parallel.reduce_once = kind == "once";
      expect_same(run(config, ranks), alone, 0, kind + ", " + std::to_string(ranks) + " ranks");
    }
}

TEST_F(ShardedRun, ReplicasOfShards) {
  const Run alone = run(plain("alone"), 1);
  RunConfig config = zero3("replicas");
  config.parallel.replicas = 2;
  expect_same(run(config, 4), alone, 0, "two replicas");
}

TEST_F(ShardedRun, ACheckpointContinuesInAnotherLayout) {
  const Run alone = run(plain("alone"), 1);
  for (const bool from_sharded : {true, false}) {
    const std::string name = from_sharded ? "from-sharded" : "to-sharded";
    RunConfig saving = from_sharded ? zero3(name) : plain(name);
    saving.checkpoint.every = 3;
    saving.checkpoint.keep = 10;
    expect_same(run(saving, 3), alone, 0, name);
    RunConfig config = from_sharded ? plain(name + "-resumed") : zero3(name + "-resumed");
    config.checkpoint.resume = (fs::path(saving.run.directory) / "checkpoints/step-00000003").string();
    expect_same(run(config, 2), alone, 3, name + ", resumed");
  }
}

TEST_F(ShardedRun, ALimitThatABlockDoesNotFitIsSaidBeforeTraining) {
  RunConfig config = zero3("limit");
  config.parallel.gather_limit_bytes = 20000;
  EXPECT_THAT(testing_runs::config_error_of([&] { run(config, 2); }), HasSubstr("gather_limit_bytes"));
}

}  // namespace
}  // namespace isograd
