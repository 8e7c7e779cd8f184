// Tiny runs for tests: a corpus of generated text, a model of one or two small layers, everything in one
// folder.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <mutex>
#include <string>
#include <vector>

#include "base/error_testing.hpp"
#include "base/files.hpp"
#include "isograd/random.hpp"
#include "isograd/trainer.hpp"
#include "isograd/world.hpp"
#include "train/config.hpp"

namespace isograd::testing_runs {

// The text of the ConfigError, or "no error".
inline std::string config_error_of(const std::function<void()>& work) {
  return error_testing::error_of(work);
}

class TinyRuns : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string test = ::testing::UnitTest::GetInstance()->current_test_info()->name();
    std::replace(test.begin(), test.end(), '/', '-');  // of parameters: one folder, removed at the end
    root_ =
        std::filesystem::path(::testing::TempDir()) / ("isograd-" + std::to_string(getpid()) + "-" + test);
    std::filesystem::create_directories(root_ / "text");
    // Documents of 5 to 164 letters, so that packs are uneven and some documents are split.
    for (std::uint64_t i = 0; i < 24; ++i) {
      std::string text;
      const auto length = 5 + random_bits({.seed = 7, .sample = i}, 0) % 160;
      for (std::uint64_t j = 0; j < length; ++j)
        text += static_cast<char>('a' + random_bits({.seed = 7, .sample = i, .layer = 1}, j) % 7);
      write_file(root_ / "text" / (std::to_string(100 + i) + ".txt"), text);
    }
  }
  void TearDown() override {
    if (!HasFailure()) std::filesystem::remove_all(root_);
  }

  RunConfig tiny(const std::string& name, const std::string& dtype = "float32") const {
    RunConfig config;
    config.run.directory = (root_ / name).string();
    config.run.seed = 3;
    config.run.peak_tflops = 1;  // none is measured, which takes longer than such a run
    config.data.text = {(root_ / "text").string()};
    config.data.cache = (root_ / "cache").string();
    config.data.pack_length = 48;
    config.data.validation_fraction = 0.2;
    config.batch.packs_per_step = 5;
    config.batch.packs_per_micro_batch = 2;
    auto& shape = config.model.shape;
    shape.hidden = 16;
    shape.layers = 1;
    shape.heads = 2;
    shape.key_value_heads = 1;
    shape.head_dim = 8;
    shape.feed_forward = 24;
    shape.max_positions = 64;
    config.train.steps = 7;
    config.train.dtype = dtype;
    config.train.evaluate_every = 2;
    config.train.evaluate_packs = 3;
    config.schedule.peak = 0.01;
    config.schedule.warmup = 2;
    config.checkpoint.every = 0;
    config.parallel.bucket_bytes = 4096;  // several buckets even here
    config.sample.tokens = 0;
    return config;
  }

  // A run that also saves after step 3, and one that continues it from there.
  RunConfig saving(const std::string& name, const std::string& dtype = "float32") const {
    RunConfig config = tiny(name, dtype);
    config.checkpoint.every = 3;
    config.checkpoint.keep = 10;
    return config;
  }
  RunConfig continued(const RunConfig& saved, const std::string& name) const {
    RunConfig config = tiny(name, saved.train.dtype);
    config.checkpoint.resume = saved.run.directory + "/checkpoints/step-00000003";
    return config;
  }

  // A scorer of 61 rows, every sixth of them positive.
  RunConfig scorer(const std::string& name, const std::string& loss = "smooth_ap") const {
    std::string csv = "a,b,c,y\n";
    for (int row = 0; row < 61; ++row)
      csv += fmt::format("{},{},{},{}\n", row * 37 % 23, row * 11 % 17 * 0.5, row * 7 % 13 - 4,
                         row % 6 == 0 ? 1 : 0);
    write_file(root_ / "table.csv", csv);
    RunConfig config = tiny(name);
    config.model = {}, config.data = {}, config.batch = {}, config.sample = {};
    config.model.kind = "scorer";
    config.model.scorer_units = 5;
    config.data.table = (root_ / "table.csv").string();
    config.data.validation_fraction = 0.2;
    config.batch.rows_per_step = 25;  // uneven over 2, 3 and 4 ranks; an epoch ends with a short step
    config.ranking.loss = loss;
    config.ranking.temperature = 0.3, config.ranking.queue_size = 30, config.ranking.budget = 0.4;
    config.ranking.quantile = 0.3;
    config.ranking.compare = false;
    return config;
  }

  struct Run {
    std::vector<Outcome> outcomes;  // by rank
    std::vector<StepEvent> steps;   // of rank 0
    std::vector<Evaluation> evaluations;
  };

  static Run run(const RunConfig& config, int ranks,
                 const std::function<void(World&, TrainerHooks&)>& add = {}) {
    Run result;
    result.outcomes.resize(static_cast<std::size_t>(ranks));
    run_ranks(ranks,
              [&](World& world) {
                TrainerHooks hooks;
                if (world.rank == 0) {
                  hooks.on_step = [&](const StepEvent& event) { result.steps.push_back(event); };
                  hooks.on_evaluation = [&](const Evaluation& evaluation) {
                    result.evaluations.push_back(evaluation);
                  };
                }
                if (add) add(world, hooks);
                result.outcomes[static_cast<std::size_t>(world.rank)] = Trainer(config, world, hooks).run();
              },
              {.timeout = std::chrono::seconds(20)});
    return result;
  }

  static std::string file(const std::filesystem::path& checkpoint, const char* name) {
    return read_file(checkpoint / name);
  }

  // The same samples in each step, and losses and norms within these relative errors.
  static void expect_same_steps(const Run& found, const Run& expected, double loss, double norm,
                                const std::string& where) {
    ASSERT_EQ(found.steps.size(), expected.steps.size()) << where;
    for (std::size_t i = 0; i < expected.steps.size(); ++i) {
      const StepReport &a = found.steps[i].report, &b = expected.steps[i].report;
      EXPECT_EQ(a.step_counts.samples, b.step_counts.samples) << where << ", step " << i + 1;
      EXPECT_EQ(a.step_counts.targets, b.step_counts.targets) << where << ", step " << i + 1;
      EXPECT_NEAR(a.loss, b.loss, loss * std::abs(b.loss)) << where << ", step " << i + 1;
      EXPECT_NEAR(a.norm, b.norm, norm * b.norm) << where << ", step " << i + 1;
    }
  }

  // A run of 7 steps that continues from the checkpoint of the third one has the same bits as one without a
  // break: in its steps, figures and last checkpoint. `files` of that have changed in between.
  static void expect_continued_alike(RunConfig config, int ranks, const std::vector<const char*>& files) {
    const std::filesystem::path directory = config.run.directory;
    const std::string name = directory.filename().string();
    config.checkpoint.every = 3, config.checkpoint.keep = 10;
    const Run straight = run(config, ranks);
    ASSERT_EQ(straight.steps.size(), 7u) << name;
    const std::filesystem::path middle = directory / "checkpoints/step-00000003";
    config.run.directory += "-resumed";
    config.checkpoint.resume = middle.string();
    const Run resumed = run(config, ranks);
    ASSERT_EQ(resumed.steps.size(), 4u) << name;
    for (std::size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(resumed.steps[i].report.loss, straight.steps[3 + i].report.loss) << name;
      EXPECT_EQ(resumed.steps[i].report.norm, straight.steps[3 + i].report.norm) << name;
    }
    const Outcome &found = resumed.outcomes[0], &expected = straight.outcomes[0];
    EXPECT_EQ(file(found.checkpoint, "config.json"), file(expected.checkpoint, "config.json")) << name;
    for (const char* part : files) {
      EXPECT_TRUE(file(found.checkpoint, part) == file(expected.checkpoint, part)) << part << " " << name;
      EXPECT_FALSE(file(middle, part) == file(expected.checkpoint, part)) << part << " " << name;
    }
    EXPECT_EQ(found.validation_loss, expected.validation_loss) << name;
    ASSERT_EQ(found.figures.size(), expected.figures.size()) << name;
    for (std::size_t i = 0; i < expected.figures.size(); ++i)
      EXPECT_EQ(found.figures[i].value, expected.figures[i].value) << name;
  }

  // The error of a run on two ranks after a change of its configuration.
  struct Told {
    std::function<void(RunConfig&)> change;
    std::string text;  // a part of the error, or "no error"
  };
  static void expect_told(const RunConfig& base, const std::vector<Told>& all) {
    for (const auto& [change, text] : all) {
      RunConfig config = base;
      change(config);
      const std::string told = config_error_of([&] { run(config, 2); });
      EXPECT_NE(told.find(text), std::string::npos) << told << "\n" << text;
    }
  }

  std::filesystem::path root_;
};

}  // namespace isograd::testing_runs
