// Runs of a scorer end to end: the same on every layout, saved and continued bit for bit, refused where they
// cannot be.
#include "train/scorer_task.hpp"

#include <gmock/gmock.h>

#include "train/trainer_testing.hpp"

namespace isograd {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing_runs::config_error_of;

class ScorerRuns : public testing_runs::TinyRuns {
 protected:
  void SetUp() override {
    TinyRuns::SetUp();
    write_table();
  }

  void write_table() const {
    std::string csv = "a,b,c,y\n";
    for (int row = 0; row < 61; ++row)
      csv += fmt::format("{},{},{},{}\n", row * 37 % 23, row * 11 % 17 * 0.5, row * 7 % 13 - 4,
                         row % 6 == 0 ? 1 : 0);
    write_file(root_ / "table.csv", csv);
  }

  RunConfig scorer(const std::string& name, const std::string& loss = "smooth_ap") const {
    RunConfig config = tiny(name);
    config.model = RunConfig{}.model;
    config.model.kind = "scorer";
    config.model.scorer_units = 5;
    config.data = RunConfig{}.data;
    config.data.table = (root_ / "table.csv").string();
    config.data.validation_fraction = 0.2;
    config.batch = RunConfig{}.batch;
    config.batch.rows_per_step = 25;  // uneven over 2 and 3 ranks; an epoch ends with a short step
    config.ranking.loss = loss;
    config.ranking.temperature = 0.3, config.ranking.queue_size = 30, config.ranking.budget = 0.4;
    config.ranking.quantile = 0.3;
    config.ranking.compare = false;
    return config;
  }
};

// The queue of the loss is a part of what a run is: without it the steps after a resume would rank among
// fewer rows.
TEST_F(ScorerRuns, SavedAndReloadedEqualsUninterrupted) {
  for (const char* loss : {"smooth_ap", "recall_at_quantile", "pauc", "sigmoid_focal", "cross_entropy"})
    for (const char* strategy : {"bucketed", "zero2", "zero3"})
      for (const int ranks : {1, 2, 3}) {
        if (ranks == 1 && std::string(strategy) != "bucketed") continue;
        const std::string name = fmt::format("{}-{}-{}", loss, strategy, ranks);
        RunConfig saving = scorer(name, loss);
        saving.parallel.strategy = strategy;
        saving.checkpoint.every = 3;
        saving.checkpoint.keep = 10;
        const Run straight = run(saving, ranks);
        ASSERT_EQ(straight.steps.size(), 7u) << name;
        RunConfig config = saving;
        config.run.directory += "-resumed";
        const fs::path middle = fs::path(saving.run.directory) / "checkpoints/step-00000003";
        config.checkpoint.resume = middle.string();
        const Run resumed = run(config, ranks);
        ASSERT_EQ(resumed.steps.size(), 4u) << name;
        for (std::size_t i = 0; i < 4; ++i) {
          EXPECT_EQ(resumed.steps[i].report.loss, straight.steps[3 + i].report.loss) << name;
          EXPECT_EQ(resumed.steps[i].report.norm, straight.steps[3 + i].report.norm) << name;
        }
        std::vector<const char*> files = {"config.json", "model.safetensors", "optimizer.safetensors"};
        const bool ranks_rows = make_ranking_loss(config, loss, Group::solo()) != nullptr;
        if (ranks_rows) files.push_back("ranking.safetensors");
        for (const char* part : files) {
          EXPECT_TRUE(file(resumed.outcomes[0].checkpoint, part) ==
                      file(straight.outcomes[0].checkpoint, part))
              << part << " " << name;
          EXPECT_EQ(file(middle, part) == file(straight.outcomes[0].checkpoint, part), part == files[0])
              << part << " " << name << ": what does not move shows nothing";
        }
        EXPECT_EQ(*resumed.outcomes[0].validation_loss, *straight.outcomes[0].validation_loss);
        ASSERT_EQ(resumed.outcomes[0].figures.size(), 3u);
        for (std::size_t i = 0; i < 3; ++i)
          EXPECT_EQ(resumed.outcomes[0].figures[i].value, straight.outcomes[0].figures[i].value);
      }
}

// Ranks along tp hold the units of hidden layers together; rows are ranked over the others.
TEST_F(ScorerRuns, HeldTogetherIsTheRunOfOneProcess) {
  for (const char* loss : {"smooth_ap", "recall_at_quantile", "pauc", "sigmoid_focal", "cross_entropy"})
    for (const int layers : {1, 2, 3}) {
      RunConfig plain = scorer(fmt::format("alone-{}-{}", loss, layers), loss);
      plain.model.scorer_layers = layers;
      plain.train.dtype = "float64";
      plain.parallel.strategy = "bucketed";
      plain.verify.checksums_every = 1;
      const Run alone = run(plain, 1);
      for (const auto& [ranks, tp, strategy] :
           {std::tuple{2, 2, "bucketed"}, {3, 3, "zero3"}, {4, 2, "zero1"}, {5, 5, "naive"}}) {
        const std::string where = fmt::format("{}, {} layers, {} ranks, tp {}", loss, layers, ranks, tp);
        RunConfig config = plain;
        config.run.directory += fmt::format("-{}-{}", ranks, tp);
        config.parallel.tp = tp;
        config.parallel.strategy = strategy;
        const Run found = run(config, ranks);
        ASSERT_EQ(found.steps.size(), alone.steps.size()) << where;
        for (std::size_t i = 0; i < alone.steps.size(); ++i) {
          const StepReport &a = found.steps[i].report, &b = alone.steps[i].report;
          EXPECT_EQ(a.census.samples, b.census.samples) << where;
          EXPECT_NEAR(a.loss, b.loss, 1e-9 * std::abs(b.loss)) << where << ", step " << i;
          EXPECT_NEAR(a.norm, b.norm, 1e-8 * b.norm) << where << ", step " << i;
        }
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
  const RunConfig saving = scorer("run");
  run(saving, 1);
  const auto refused = [&](const std::function<void(RunConfig&)>& change) {
    RunConfig config = saving;
    config.checkpoint.resume = "latest";
    change(config);
    return config_error_of([&] { run(config, 2); });
  };
  EXPECT_EQ(refused([](RunConfig&) {}), "no error");
  EXPECT_THAT(refused([](RunConfig& c) { c.ranking.loss = "pauc"; }),
              HasSubstr("ranking.loss: found pauc; expected smooth_ap"));
  EXPECT_THAT(refused([](RunConfig& c) { c.ranking.queue_size = 7; }), HasSubstr("ranking.queue_size"));
  EXPECT_THAT(refused([](RunConfig& c) { c.batch.rows_per_step = 9; }), HasSubstr("batch.rows_per_step"));
  EXPECT_THAT(refused([](RunConfig& c) { c.model.scorer_units = 9; }), HasSubstr("model.scorer_units"));
  EXPECT_THAT(refused([](RunConfig& c) { c.run.seed = 4; }), HasSubstr("run.seed"));

  fs::remove(fs::path(saving.run.directory) / "checkpoints/step-00000007/ranking.safetensors");
  EXPECT_THAT(refused([](RunConfig&) {}), HasSubstr("ranking.safetensors"));
}

TEST_F(ScorerRuns, WhatCannotBeTrainedIsRefusedOnEveryRank) {
  const auto refused = [&](const std::function<void(RunConfig&)>& change) {
    RunConfig config = scorer("refused");
    change(config);
    return config_error_of([&] { run(config, 2); });
  };
  EXPECT_THAT(refused([](RunConfig& c) { c.data.table.clear(); }), HasSubstr("data.table"));
  EXPECT_THAT(refused([](RunConfig& c) { c.parallel.cp_ring = 2; }), HasSubstr("parallel.cp_ring"));
  EXPECT_THAT(refused([](RunConfig& c) { c.verify.every = 2; }), HasSubstr("verify.every"));
  EXPECT_THAT(refused([](RunConfig& c) { c.parallel.tp = 2, c.model.scorer_layers = 0; }),
              HasSubstr("without a hidden layer"));
  EXPECT_THAT(refused([](RunConfig& c) { c.parallel.tp = 2, c.model.scorer_units = 1; }),
              HasSubstr("2 ranks for 1 units of a hidden layer"));
  EXPECT_THAT(refused([](RunConfig& c) {
                c.parallel.strategy = "zero3";
                c.parallel.checkpoint_activations = true;
              }),
              HasSubstr("fill the loss's queue twice"));
}

}  // namespace
}  // namespace isograd
