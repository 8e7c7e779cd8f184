// Runs of a scorer end to end: the same on every layout, saved and continued bit for bit, refused where they
// cannot be.
#include <gmock/gmock.h>

#include "full_tests.hpp"
#include "train/trainer_testing.hpp"

namespace isograd {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing_runs::config_error_of;

class ScorerRuns : public testing_runs::TinyRuns {};

// The queue of the loss is a part of what a run is: without it the steps after a resume would rank among
// fewer rows. Each loss in a third of the cells; ISOGRAD_FULL_TESTS=1: in all.
TEST_F(ScorerRuns, SavedAndReloadedEqualsUninterrupted) {
  std::size_t turn = 0;
  for (const std::string loss : {"smooth_ap", "recall_at_quantile", "pauc", "sigmoid_focal", "cross_entropy"})
    for (const std::string strategy : {"bucketed", "zero2", "zero3"})
      for (const int ranks : {1, 2, 3}) {
        if (ranks == 1 && strategy != "bucketed") continue;
        if (!full_tests() && turn++ % 3 != 0) continue;
        RunConfig config = scorer(fmt::format("{}-{}-{}", loss, strategy, ranks), loss);
        config.parallel.strategy = strategy;
        std::vector<const char*> files = {"model.safetensors", "optimizer.safetensors"};
        if (loss != "sigmoid_focal" && loss != "cross_entropy") files.push_back("ranking.safetensors");
        expect_continued_alike(config, ranks, files);
      }
}

// Ranks along tp hold the units of hidden layers together; rows are ranked over the others. Losses and
// numbers of layers take turns with the ranks; ISOGRAD_FULL_TESTS=1: all.
TEST_F(ScorerRuns, HeldTogetherIsTheRunOfOneProcess) {
  std::size_t turn = 0;
  for (const char* loss : {"smooth_ap", "recall_at_quantile", "pauc", "sigmoid_focal", "cross_entropy"})
    for (const int layers : {1, 2, 3}) {
      RunConfig plain = scorer(fmt::format("alone-{}-{}", loss, layers), loss);
      plain.model.scorer_layers = layers;
      plain.train.dtype = "float64";
      plain.parallel.strategy = "bucketed";
      plain.verify.checksums_every = 1;
      const Run alone = run(plain, 1);
      for (const auto& [ranks, tp, strategy] : {std::tuple{2, 2, "bucketed"},
                                                {3, 3, "zero3"},
                                                {4, 2, "zero1"},
                                                {5, 5, "naive"},
                                                {4, 1, "zero2"}}) {
        if (!full_tests() && turn++ % 3 != 0) continue;  // of five: each in turn
        const std::string where = fmt::format("{}, {} layers, {} ranks, tp {}", loss, layers, ranks, tp);
        RunConfig config = plain;
        config.run.directory += fmt::format("-{}-{}", ranks, tp);
        config.parallel.tp = tp;
        config.parallel.strategy = strategy;
        const Run found = run(config, ranks);
        expect_same_steps(found, alone, 1e-9, 1e-8, where);
        EXPECT_NEAR(*found.outcomes[0].validation_loss, *alone.outcomes[0].validation_loss, 1e-9) << where;
        for (std::size_t i = 0; i < 3; ++i)
          EXPECT_NEAR(found.outcomes[0].figures[i].value, alone.outcomes[0].figures[i].value, 1e-12) << where;
        RunConfig going_on = plain;
        going_on.run.directory += fmt::format("-after-{}-{}", ranks, tp);
        going_on.model.load = found.outcomes[0].checkpoint.string();
        EXPECT_NE(run(going_on, 1).steps[0].report.loss, alone.steps[0].report.loss) << where;
      }
    }
}

TEST_F(ScorerRuns, AnEvaluationLeavesTheRunAsItIs) {
  RunConfig often = scorer("often"), never = scorer("never");
  often.train.evaluate_every = 1;
  never.train.evaluate_every = 0;
  const Run a = run(often, 2), b = run(never, 2);
  ASSERT_EQ(a.evaluations.size(), 7u);
  ASSERT_EQ(b.evaluations.size(), 1u);
  EXPECT_EQ(a.evaluations[6].loss, b.evaluations[0].loss);
  for (const char* part : {"model.safetensors", "ranking.safetensors"})
    EXPECT_TRUE(file(a.outcomes[0].checkpoint, part) == file(b.outcomes[0].checkpoint, part)) << part;
}

TEST_F(ScorerRuns, WithoutHeldOutRowsTheTrainingRowsAreRanked) {
  RunConfig config = scorer("run");
  config.data.validation_fraction = 0;
  const Run done = run(config, 2);
  ASSERT_EQ(done.outcomes[0].figures.size(), 3u);
  EXPECT_FALSE(done.outcomes[0].validation_loss);
  EXPECT_EQ(done.evaluations.back().targets, 0);
  EXPECT_THAT(read_file(done.outcomes[0].report), HasSubstr("Ranking of the training rows"));
}

// Trained from the weights of a checkpoint, with a queue of its own.
TEST_F(ScorerRuns, StartsFromTheWeightsOfACheckpoint) {
  const Run first = run(scorer("first"), 1);
  RunConfig config = scorer("second");
  config.model.load = first.outcomes[0].checkpoint.string();
  EXPECT_EQ(run(config, 2).steps.size(), 7u);
  config = scorer("third", "pauc");  // which has a bias of its output: another shape, the loaded one
  config.model.load = first.outcomes[0].checkpoint.string();
  EXPECT_EQ(run(config, 1).steps.size(), 7u);
}

TEST_F(ScorerRuns, IsComparedWithCrossEntropyByTheSameLoop) {
  RunConfig config = scorer("run");
  config.ranking.compare = true;
  config.train.evaluate_every = 0;
  const Run done = run(config, 2);
  const fs::path other = fs::path(config.run.directory) / "cross_entropy";
  EXPECT_TRUE(fs::exists(other / "checkpoints/step-00000007"));
  const RunConfig alone = scorer("alone", "cross_entropy");
  const Run cross_entropy = run(alone, 2);
  EXPECT_TRUE(file(other / "checkpoints/step-00000007", "model.safetensors") ==
              file(cross_entropy.outcomes[0].checkpoint, "model.safetensors"));
  const std::string report = read_file(done.outcomes[0].report);
  EXPECT_THAT(report, HasSubstr("Ranking of the held-out rows"));
  EXPECT_THAT(report, HasSubstr(fmt::format("{:.4f}", cross_entropy.outcomes[0].figures[0].value)));
}

// Both folders are a run's, and go on or are replaced together.
TEST_F(ScorerRuns, TheComparisonOfAnEarlierRunIsNotWrittenOver) {
  RunConfig config = scorer("run");
  config.ranking.compare = true;
  run(config, 2);
  const fs::path directory = config.run.directory, metrics = directory / "cross_entropy/metrics.jsonl";
  fs::rename(directory / "cross_entropy", root_ / "kept");
  fs::remove_all(directory);
  fs::create_directories(directory);
  fs::rename(root_ / "kept", directory / "cross_entropy");
  const std::string before = read_file(metrics);
  EXPECT_THAT(config_error_of([&] { run(config, 2); }), HasSubstr("trained for comparison"));
  EXPECT_EQ(read_file(metrics), before);
  EXPECT_FALSE(fs::exists(directory / "checkpoints"));
  config.overwrite = true;
  run(config, 2);
  config.overwrite = false;
  config.checkpoint.resume = "latest";
  config.train.steps = 9;
  run(config, 2);
  EXPECT_TRUE(fs::exists(directory / "cross_entropy/checkpoints/step-00000009"));
  // Ended before the comparison had saved anything: it begins again.
  fs::remove_all(directory / "cross_entropy/checkpoints");
  run(config, 2);
  EXPECT_TRUE(fs::exists(directory / "cross_entropy/checkpoints/step-00000009"));
}

TEST_F(ScorerRuns, AnotherRunIsRefusedByKey) {
  RunConfig config = scorer("run");
  const Run saving = run(config, 1);
  config.checkpoint.resume = "latest";
  expect_told(config, {{[](RunConfig&) {}, "no error"},
                       {[](RunConfig& c) { c.ranking.loss = "pauc"; },
                        "ranking.loss: found pauc; expected smooth_ap"},
                       {[](RunConfig& c) { c.ranking.queue_size = 7; }, "ranking.queue_size"},
                       {[](RunConfig& c) { c.batch.rows_per_step = 9; }, "batch.rows_per_step"},
                       {[](RunConfig& c) { c.model.scorer_units = 9; }, "model.scorer_units"},
                       {[](RunConfig& c) { c.run.seed = 4; }, "run.seed"}});
  fs::remove(saving.outcomes[0].checkpoint / "ranking.safetensors");
  expect_told(config, {{[](RunConfig&) {}, "ranking.safetensors"}});
}

TEST_F(ScorerRuns, WhatCannotBeTrainedIsRefusedOnEveryRank) {
  expect_told(scorer("refused"),
              {{[](RunConfig& c) { c.data.table.clear(); }, "data.table"},
               {[](RunConfig& c) { c.parallel.cp_ring = 2; }, "parallel.cp_ring"},
               {[](RunConfig& c) { c.verify.every = 2; }, "verify.every"},
               {[](RunConfig& c) { c.parallel.tp = 2, c.model.scorer_layers = 0; }, "without a hidden layer"},
               {[](RunConfig& c) { c.parallel.tp = 2, c.model.scorer_units = 1; },
                "2 ranks for 1 units of a hidden layer"},
               {[](RunConfig& c) {
                  c.parallel.strategy = "zero3";
                  c.parallel.checkpoint_activations = true;
                },
                "fill the loss's queue twice"}});
}

}  // namespace
}  // namespace isograd
