// Whole runs under every strategy: the same training, and checkpoints that none of them owns.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "train/trainer_testing.hpp"

namespace isograd {
namespace fs = std::filesystem;
namespace {

struct Kind {
  std::string strategy, share;
  int replicas = 1;
  bool once = false;

  void put_into(RunConfig& config) const {
    config.parallel.strategy = strategy;
    config.parallel.share_parameters = share;
    config.parallel.replicas = replicas;
    config.parallel.reduce_once = once;
    config.parallel.first_bucket_bytes = 1024;
  }
  std::string name() const {
    return strategy + "-" + share + "-" + std::to_string(replicas) + (once ? "-once" : "");
  }
};

const std::vector<Kind> kKinds = {{"naive", "off"},     {"overlapped", "off"},    {"bucketed", "off"},
                                  {"bucketed", "auto"}, {"zero1", "off"},         {"zero1", "on"},
                                  {"zero2", "off"},     {"zero2", "off", 2},      {"zero2", "off", 1, true},
                                  {"zero1", "on", 2},   {"zero3", "off"},         {"zero3", "on"},
                                  {"zero3", "off", 2},  {"zero3", "off", 1, true}};

class Strategies : public testing_runs::TinyRuns {};

// fp64; the bound is that of Resume.AtAnotherNumberOfRanks.
TEST_F(Strategies, TrainAlike) {
  const Run one = run(tiny("one", "float64"), 1);
  for (const Kind& kind : kKinds)
    for (int ranks : {2, 3, 4}) {
      if (ranks % kind.replicas != 0) continue;
      if (kind.share == "on" && ranks == kind.replicas) continue;  // no rank to share with: refused
      RunConfig config = tiny(kind.name() + "-" + std::to_string(ranks), "float64");
      kind.put_into(config);
      const Run many = run(config, ranks);
      ASSERT_EQ(many.steps.size(), one.steps.size());
      for (std::size_t i = 0; i < one.steps.size(); ++i)
        EXPECT_NEAR(many.steps[i].report.loss, one.steps[i].report.loss, 1e-9) << kind.name() << " " << ranks;
      EXPECT_NEAR(many.steps[0].report.norm, one.steps[0].report.norm, 1e-13) << kind.name() << " " << ranks;
      EXPECT_NEAR(*many.outcomes[0].validation_loss, *one.outcomes[0].validation_loss, 1e-9);
    }
}

// Saved under one strategy and number of ranks, continued under another.
TEST_F(Strategies, LoadOneAnothersCheckpoints) {
  const Run straight = run(tiny("straight", "float64"), 1);
  const std::vector<std::pair<Kind, int>> places = {{kKinds[6], 3}, {kKinds[3], 2},  {kKinds[5], 4},
                                                    {kKinds[7], 4}, {kKinds[10], 3}, {kKinds[0], 2},
                                                    {kKinds[12], 2}};
  for (std::size_t i = 0; i < places.size(); ++i) {
    const auto& [from, from_ranks] = places[i];
    const auto& [to, to_ranks] = places[(i + 1) % places.size()];
    RunConfig saving = tiny("saving-" + std::to_string(i), "float64");
    saving.checkpoint.every = 3;
    saving.checkpoint.keep = 10;
    from.put_into(saving);
    run(saving, from_ranks);
    RunConfig config = tiny("resumed-" + std::to_string(i), "float64");
    config.checkpoint.resume = (fs::path(saving.run.directory) / "checkpoints/step-00000003").string();
    to.put_into(config);
    const Run resumed = run(config, to_ranks);
    ASSERT_EQ(resumed.steps.size(), 4u);
    for (std::size_t s = 0; s < 4; ++s)
      EXPECT_NEAR(resumed.steps[s].report.loss, straight.steps[3 + s].report.loss, 1e-9)
          << from.name() << " to " << to.name() << ", step " << s + 4;
  }
}

TEST_F(Strategies, ResumeBitForBit) {
  for (const Kind& kind : {kKinds[3], kKinds[6], kKinds[8], kKinds[10]})
    for (const char* dtype : {"float32", "bfloat16"}) {
      RunConfig saving = tiny("saving-" + kind.name() + dtype, dtype);
      saving.checkpoint.every = 3;
      saving.checkpoint.keep = 10;
      kind.put_into(saving);
      const Run saved = run(saving, 3);
      RunConfig config = tiny("resumed-" + kind.name() + dtype, dtype);
      config.checkpoint.resume = (fs::path(saving.run.directory) / "checkpoints/step-00000003").string();
      kind.put_into(config);
      const Run resumed = run(config, 3);
      for (const char* name : {"model.safetensors", "optimizer.safetensors"})
        EXPECT_TRUE(file(saved.outcomes[0].checkpoint, name) == file(resumed.outcomes[0].checkpoint, name))
            << kind.name() << " " << dtype << " " << name;
    }
}

TEST_F(Strategies, ANanOnOneRankMovesNothingAnywhere) {
  for (const Kind& kind : {kKinds[3], kKinds[4], kKinds[6], kKinds[10]}) {
    RunConfig config = tiny("nan-" + kind.name());
    kind.put_into(config);
    config.checkpoint.every = 1;
    config.checkpoint.keep = 10;
    int calls = 0;
    const Run stopped = run(config, 3, [&](World& world, TrainerHooks& hooks) {
      if (world.rank != 2) return;
      hooks.wrap_forward = [&](ForwardLossTerms forward) {
        return [&, forward](const Batch& batch) {
          LossTerms terms = forward(batch);
          if (terms[0].sum.requires_grad() && batch.num_tokens() > 0 && ++calls > 6)
            terms[0].sum = terms[0].sum * std::nan("");
          return terms;
        };
      };
    });
    for (const Outcome& outcome : stopped.outcomes)
      EXPECT_EQ(outcome.end, Outcome::End::kDiverged) << kind.name();
    EXPECT_LT(stopped.outcomes[0].steps, 7);
  }
}

TEST_F(Strategies, WhatCannotBeIsRefused) {
  using ::testing::HasSubstr;
  using testing_runs::config_error_of;
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
}

}  // namespace
}  // namespace isograd
