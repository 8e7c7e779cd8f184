// Tiny runs for tests: a corpus of generated text, a model of one or two small layers, everything in one
// folder.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
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

  std::filesystem::path root_;
};

inline std::string config_error_of(const std::function<void()>& work) {
  return error_testing::error_of(work);
}

}  // namespace isograd::testing_runs
