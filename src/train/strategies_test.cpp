// Whole runs under every strategy: what is trained, measured, sampled and saved is what one process has, and
// checkpoints that none of them owns.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "full_tests.hpp"
#include "train/trainer_testing.hpp"

namespace isograd {
namespace {

using ::testing::HasSubstr;
using testing_runs::config_error_of;

struct Kind {
  std::string strategy, share;
  int replicas = 1;
  std::string option = "";  // reduce_once, checkpoint, kept

  std::string name() const { return strategy + "-" + share + "-" + std::to_string(replicas) + option; }
};

const std::vector<Kind> kKinds = {{"naive", "off"},
                                  {"overlapped", "off"},
                                  {"bucketed", "off"},
                                  {"bucketed", "auto"},
                                  {"zero1", "off"},
                                  {"zero1", "on"},
                                  {"zero2", "off"},
                                  {"zero2", "off", 2},
                                  {"zero2", "off", 1, "reduce_once"},
                                  {"zero1", "on", 2},
                                  {"zero3", "off"},
                                  {"zero3", "on"},
                                  {"zero3", "off", 2},
                                  {"zero3", "off", 1, "reduce_once"},
                                  {"zero3", "off", 1, "checkpoint"},
                                  {"zero3", "off", 1, "kept"}};

class Strategies : public testing_runs::TinyRuns {
 protected:
  static RunConfig under(RunConfig config, const Kind& kind) {
    config.model.shape.layers = 3;
    config.sample.tokens = 12;
    auto& parallel = config.parallel;
    parallel.strategy = kind.strategy;
    parallel.share_parameters = kind.share;
    parallel.replicas = kind.replicas;
    parallel.reduce_once = kind.option == "reduce_once";
    parallel.checkpoint_activations = kind.option == "checkpoint";
    parallel.reshard_after_forward = kind.option != "kept";
    parallel.first_bucket_bytes = 1024;
    return config;
  }
  // `skip`: steps made before a resume. Layouts differ in rounding only; AdamW's trajectory is comparable in
  // fp64 (each element's step depends on the sign of tiny gradients below that). u = 1.1e-16, some 1e3
  // operations deep, times AdamW's amplification of small gradients over the steps: 1e-9 leaves two orders of
  // room and is far below one step's change of the loss (1e-3).
  static void expect_same(const Run& found, const Run& expected, std::size_t skip, const std::string& where) {
    ASSERT_EQ(found.steps.size() + skip, expected.steps.size()) << where;
    for (std::size_t i = 0; i < found.steps.size(); ++i) {
      const StepReport &a = found.steps[i].report, &b = expected.steps[i + skip].report;
      EXPECT_EQ(a.step_counts.targets, b.step_counts.targets) << where;
      EXPECT_NEAR(a.loss, b.loss, 1e-9 * std::abs(b.loss)) << where << ", step " << i;
      EXPECT_NEAR(a.norm, b.norm, (skip + i == 0 ? 1e-13 : 1e-9) * std::abs(b.norm)) << where << i;
    }
    EXPECT_NEAR(*found.outcomes[0].validation_loss, *expected.outcomes[0].validation_loss, 1e-9) << where;
    EXPECT_EQ(found.outcomes[0].sample, expected.outcomes[0].sample) << where;
    EXPECT_NEAR(found.outcomes[0].baseline, expected.outcomes[0].baseline, 1e-13) << where;
    EXPECT_EQ(found.evaluations.back().targets, expected.evaluations.back().targets) << where;
  }
};

// Each on half of the numbers of ranks, by turns; ISOGRAD_FULL_TESTS=1: on all.
TEST_F(Strategies, AreTheRunOfOneProcess) {
  const Run one = run(under(tiny("one", "float64"), {"bucketed", "auto"}), 1);
  for (std::size_t i : {1u, 4u, 6u})
    EXPECT_GT(std::abs(one.steps[0].report.loss - one.steps[i].report.loss), 1e-5)
        << "a step would not be seen";
  EXPECT_LT(*one.outcomes[0].validation_loss, one.evaluations[0].loss) << "nothing was learnt";
  DefaultCases made(2);
  for (const Kind& kind : kKinds)
    for (int ranks : {1, 2, 3, 4, 5}) {
      if (ranks % kind.replicas != 0 || (ranks > 4 && kind.strategy != "zero3")) continue;
      if (kind.share == "on" && ranks == kind.replicas) continue;  // no rank to share with: refused
      if (!made.has(fmt::format("{} {}", kind.name(), ranks))) continue;
      const std::string name = kind.name() + "-" + std::to_string(ranks);
      expect_same(run(under(tiny(name, "float64"), kind), ranks), one, 0, name);
    }
}

// Saved under one strategy and number of ranks, continued under another.
TEST_F(Strategies, LoadOneAnothersCheckpoints) {
  const Run straight = run(under(tiny("straight", "float64"), {"bucketed", "auto"}), 1);
  const std::vector<std::pair<Kind, int>> places = {{kKinds[6], 3}, {kKinds[3], 2}, {kKinds[3], 1},
                                                    {kKinds[5], 4}, {kKinds[7], 4}, {kKinds[10], 3},
                                                    {kKinds[0], 2}, {kKinds[12], 2}};
  for (std::size_t i = 0; i < places.size(); ++i) {
    const auto& [from, from_ranks] = places[i];
    const auto& [to, to_ranks] = places[(i + 1) % places.size()];
    const RunConfig saved = under(saving("saving-" + std::to_string(i), "float64"), from);
    run(saved, from_ranks);
    expect_same(run(under(continued(saved, "resumed-" + std::to_string(i)), to), to_ranks), straight, 3,
                from.name() + " to " + to.name());
  }
}

// In one of two precisions by turns; ISOGRAD_FULL_TESTS=1: in both.
TEST_F(Strategies, ResumeBitForBit) {
  std::size_t turn = 0;
  for (const Kind& kind : {kKinds[3], kKinds[6], kKinds[8], kKinds[10]})
    for (const char* dtype : {"float32", "bfloat16"}) {
      if (!full_tests() && takes_first(turn++)) continue;
      const RunConfig config = under(saving("saving-" + kind.name() + dtype, dtype), kind);
      const Run saved = run(config, 3);
      const Run resumed = run(under(continued(config, "resumed-" + kind.name() + dtype), kind), 3);
      for (const char* name : {"model.safetensors", "optimizer.safetensors"})
        EXPECT_TRUE(file(saved.outcomes[0].checkpoint, name) == file(resumed.outcomes[0].checkpoint, name))
            << kind.name() << " " << dtype << " " << name;
    }
}

TEST_F(Strategies, WhatCannotBeIsRefused) {
  RunConfig config = tiny("refused");
  config.parallel.strategy = "zero1";
  config.parallel.replicas = 2;
  const std::string error = config_error_of([&] { run(config, 3); });
  EXPECT_THAT(error, HasSubstr("dp_replicate 2 x cp_ring 1 x cp_ulysses 1 for 3 ranks"));
  EXPECT_THAT(error, HasSubstr("Change parallel.replicas"));
  config.parallel.replicas = 1;
  config.parallel.strategy = "naive";
  config.parallel.share_parameters = "on";
  EXPECT_THAT(config_error_of([&] { run(config, 2); }), HasSubstr("found stage 0, share_parameters true"));
  RunConfig limited = under(tiny("limit"), kKinds[10]);
  limited.parallel.gather_limit_bytes = 20000;  // a block does not fit: said before training
  EXPECT_THAT(config_error_of([&] { run(limited, 2); }), HasSubstr("gather_limit_bytes"));
}

}  // namespace
}  // namespace isograd
