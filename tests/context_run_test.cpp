// Whole training runs with samples cut over ranks: what is trained and measured is what one process has.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "train/trainer_testing.hpp"

namespace isograd {
namespace {

using ::testing::HasSubstr;

class ContextRun : public testing_runs::TinyRuns {
 protected:
  RunConfig with(const std::string& name, int ring, int ulysses,
                 const std::string& strategy = "bucketed") const {
    RunConfig config = tiny(name, "float64");
    config.model.shape.layers = 2;
    config.parallel.cp_ring = ring;
    config.parallel.cp_ulysses = ulysses;
    config.parallel.strategy = strategy;
    return config;
  }
  static void expect_same(const Run& found, const Run& wanted, const std::string& where) {
    ASSERT_EQ(found.steps.size(), wanted.steps.size()) << where;
    for (std::size_t i = 0; i < found.steps.size(); ++i) {
      const StepReport &a = found.steps[i].report, &b = wanted.steps[i].report;
      EXPECT_EQ(a.census.targets, b.census.targets) << where;
      EXPECT_EQ(a.census.tokens, b.census.tokens) << where;
      EXPECT_EQ(a.census.samples, b.census.samples) << where;
      EXPECT_NEAR(a.loss, b.loss, 1e-9 * std::abs(b.loss)) << where << ", step " << i;
      EXPECT_NEAR(a.norm, b.norm, 1e-9 * std::abs(b.norm)) << where << ", step " << i;
    }
    EXPECT_NEAR(*found.outcomes[0].validation_loss, *wanted.outcomes[0].validation_loss, 1e-9) << where;
  }
};

TEST_F(ContextRun, IsTheRunOfOneProcess) {
  struct Case {
    int ranks, ring, ulysses;
    const char *strategy, *fold;
  };
  double loss_of_tokens = 0;
  for (const char* kind : {"token_mean", "sample_mean"}) {
    RunConfig plain = with(std::string("alone-") + kind, 1, 1);
    plain.loss.kind = kind;
    const Run alone = run(plain, 1);
    EXPECT_GT(std::abs(alone.steps[0].report.loss - alone.steps[6].report.loss), 1e-3);
    const double loss = alone.steps[6].report.loss;
    EXPECT_GT(std::abs(loss - loss_of_tokens), 1e-3);  // the two means train differently
    loss_of_tokens = loss;
    for (const Case& one :
         {Case{2, 2, 1, "bucketed", "all"}, Case{3, 3, 1, "zero1", "none"}, Case{2, 1, 2, "zero3", "all"},
          Case{4, 2, 2, "zero2", "ring_only"}, Case{4, 2, 1, "zero1", "all"}, Case{4, 2, 1, "zero3", "none"},
          Case{8, 2, 2, "zero3", "ulysses_only"}, Case{4, 2, 1, "naive", "all"}}) {
      const std::string name = fmt::format("{} ranks, ring {}, ulysses {}, {}, fold {}, {}", one.ranks,
                                           one.ring, one.ulysses, one.strategy, one.fold, kind);
      RunConfig config = with(
          fmt::format("{}-{}-{}-{}-{}-{}", one.ranks, one.ring, one.ulysses, one.strategy, one.fold, kind),
          one.ring, one.ulysses, one.strategy);
      config.parallel.cp_fsdp_mode = one.fold;
      config.loss.kind = kind;
      expect_same(run(config, one.ranks), alone, name);
    }
  }
}

TEST_F(ContextRun, WhatDoesNotFitIsRefused) {
  const auto refused = [&](const RunConfig& config, int ranks) -> std::string {
    try {
      run(config, ranks);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_THAT(refused(with("three", 3, 1), 4), HasSubstr("product divides the ranks: 1, 2, 4"));
  // Two heads, three ranks that exchange them.
  EXPECT_THAT(refused(with("heads", 1, 3), 3), HasSubstr("Use cp_ulysses 2, and cp_ring for the rest"));
}

}  // namespace
}  // namespace isograd
