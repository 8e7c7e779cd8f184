// Runs end to end on ranks as threads: what stops them, what they refuse, what they leave behind.
#include "isograd/trainer.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cmath>
#include <csignal>
#include <fstream>
#include <thread>

#include "isograd/checkpoint.hpp"
#include "train/checkpoint_files.hpp"
#include "train/evaluate.hpp"
#include "train/prepared_run.hpp"
#include "train/rank_zero.hpp"
#include "train/run_folder.hpp"
#include "train/task.hpp"
#include "train/trainer_testing.hpp"

namespace isograd {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using testing_runs::config_error_of;

class TrainerTest : public testing_runs::TinyRuns {
 protected:
  // Rank `culprit`'s forward gives NaN in its `call`-th call, which is in a step, not in an evaluation.
  static void plant_nan(TrainerHooks& hooks, int call) {
    hooks.wrap_forward = [call](ForwardLossTerms inner) -> ForwardLossTerms {
      auto calls = std::make_shared<int>(0);
      return [=](const Batch& batch) {
        LossTerms terms = inner(batch);
        if (at::GradMode::is_enabled() && ++*calls == call) terms[0].sum = terms[0].sum * std::nan("");
        return terms;
      };
    };
  }
};

// No trainer, no report, no loop but this one: the files of the checkpoint are the trainer's bit for bit.
TEST_F(TrainerTest, APreparedRunMakesTheSameStepsWithoutATrainer) {
  struct Way {
    const char* name;
    int ranks;
    void (*set)(RunConfig&);
  };
  const Way ways[] = {
      {"one", 1, [](RunConfig&) {}},
      {"zero3", 3, [](RunConfig& c) { c.parallel.strategy = "zero3", c.train.dtype = "bfloat16"; }},
      {"tensor", 4, [](RunConfig& c) { c.parallel.tp = 2, c.parallel.strategy = "zero2"; }},
      {"stages", 2, [](RunConfig& c) { c.parallel.pp = 2, c.model.shape.layers = 2; }},
  };
  for (const Way& way : ways) {
    RunConfig config = tiny(fmt::format("{}-trainer", way.name));
    way.set(config);
    config.train.steps = 3;
    const fs::path by_trainer = run(config, way.ranks).outcomes[0].checkpoint;
    config.run.directory = (root_ / fmt::format("{}-prepared", way.name)).string();
    fs::create_directories(config.run.directory);
    std::vector<fs::path> saved(2);
    run_ranks(way.ranks, [&](World& world) {
      PreparedRun prepared(config, world);
      for (int step = 0; step < 2; ++step) EXPECT_TRUE(prepared.step().updated);
      const fs::path two = prepared.save();
      EXPECT_TRUE(prepared.step().updated);
      const fs::path three = prepared.save();
      if (world.rank == 0) saved = {two, three};
    });
    for (const char* name : {"model.safetensors", "optimizer.safetensors"}) {
      EXPECT_TRUE(file(saved[1], name) == file(by_trainer, name)) << way.name << ": " << name;
      EXPECT_FALSE(file(saved[0], name) == file(by_trainer, name)) << way.name << ": step 3 moved nothing";
    }
    EXPECT_FALSE(fs::exists(fs::path(config.run.directory) / "report.html"));
  }
}

TEST_F(TrainerTest, UnigramEntropyInClosedForm) {
  // One document "aab", framed by bos and eos: targets a, a, b, eos.
  fs::remove_all(root_ / "text");
  fs::create_directories(root_ / "text");
  write_file(root_ / "text/only.txt", "aab");
  Group solo = Group::solo();
  RunConfig config = tiny("run");
  Corpus corpus = open_corpus(config, solo);
  corpus.split = {.train = {0}, .validation = {}};
  const double expected = -(0.5 * std::log(0.5) + 2 * 0.25 * std::log(0.25));
  EXPECT_NEAR(unigram_entropy(corpus, solo), expected, 1e-14);
}

// A loss with smoothed targets is none that the entropy of the tokens can be compared with.
TEST_F(TrainerTest, AReportComparesNoLossOfAnotherKindWithTheBaseline) {
  for (const double smoothing : {0.0, 0.1})
    for (const bool validates : {false, true}) {  // before the stop
      RunConfig config = tiny(fmt::format("run-{}-{}", smoothing, validates));
      config.train.evaluate_every = validates ? 1 : 0, config.loss.label_smoothing = smoothing;
      const Run stopped = run(config, 1, [](World&, TrainerHooks& hooks) {
        hooks.on_step = [](const StepEvent& event) {
          if (event.step == 2) std::raise(SIGTERM);
        };
      });
      ASSERT_EQ(stopped.outcomes[0].steps, 3);
      const std::string report = read_file(stopped.outcomes[0].report);
      EXPECT_TRUE(report.find("unigram entropy") != std::string::npos);
      EXPECT_EQ(report.find("; the loss is ") != std::string::npos, smoothing == 0 || validates)
          << smoothing << " " << validates;
    }
}

TEST_F(TrainerTest, NanOnOneRankStopsAllAndUpdatesNothing) {
  for (const auto& [strategy, culprit] :
       {std::pair("bucketed", 0), {"bucketed", 2}, {"zero1", 0}, {"zero2", 2}, {"zero3", 0}, {"zero3", 2}}) {
    RunConfig config = tiny(fmt::format("{}-{}", strategy, culprit));
    config.parallel.strategy = strategy;
    config.checkpoint.every = 2;
    config.batch.packs_per_micro_batch = 5;  // one micro-batch a step, so that the fourth call is in step 4
    const Run result = run(config, 3, [&](World& world, TrainerHooks& hooks) {
      if (world.rank == culprit) plant_nan(hooks, 4);
    });
    for (const auto& outcome : result.outcomes) {
      EXPECT_EQ(outcome.end, Outcome::End::kDiverged);
      EXPECT_EQ(outcome.steps, 3);
      EXPECT_EQ(outcome.exit_status(), 1);
      EXPECT_EQ(outcome.checkpoint.filename(), "step-00000002");
    }
    EXPECT_FALSE(result.steps.back().report.finite);
    EXPECT_FALSE(result.steps.back().report.updated);
    EXPECT_EQ(list_checkpoints(checkpoint_root(config)).size(), 1u);
    verify_checksums(result.outcomes[0].checkpoint);
    // Without the fault the run continues from what survived and ends.
    config.checkpoint.resume = "latest";
    EXPECT_EQ(run(config, 2).outcomes[0].steps, 7);
  }
}

TEST_F(TrainerTest, NanIsSkippedAndCountedWhenSoConfigured) {
  RunConfig config = tiny("run");
  config.train.on_non_finite = "skip";
  config.batch.packs_per_micro_batch = 5;
  const Run result = run(config, 2, [&](World& world, TrainerHooks& hooks) {
    if (world.rank == 1) plant_nan(hooks, 4);
  });
  for (const auto& outcome : result.outcomes) {
    EXPECT_EQ(outcome.end, Outcome::End::kFinished);
    EXPECT_EQ(outcome.steps, 7);
    EXPECT_EQ(outcome.skipped, 1);
    EXPECT_EQ(outcome.exit_status(), 0);
  }
  const TrainingState state = open_checkpoint(result.outcomes[0].checkpoint);
  EXPECT_EQ(state.skipped, 1);
  EXPECT_EQ(state.updates, 6);
  EXPECT_TRUE(std::isfinite(result.outcomes[0].loss));
}

TEST_F(TrainerTest, ABatchWithoutAnyValidTargetMovesNothing) {
  // Every token ends a document, and the last token of a document has no target.
  const std::vector<std::uint16_t> tokens(400, 5);
  std::ofstream(root_ / "empty.bin", std::ios::binary)
      .write(reinterpret_cast<const char*>(tokens.data()), static_cast<std::streamsize>(2 * tokens.size()));
  RunConfig config = tiny("run");
  config.data.text = {};
  config.data.shards = {(root_ / "empty.bin").string()};
  config.data.end_of_text = 5;
  config.data.validation_fraction = 0;
  config.checkpoint.every = 1;
  config.checkpoint.keep = 10;
  config.train.steps = 3;
  RunConfig routed = config;  // whose balance loss and router z-loss are means over tokens that are there
  routed.run.directory += "_routed";
  routed.model.shape.family = "mixtral";
  routed.model.shape.experts = {.count = 4, .per_token = 2, .feed_forward = routed.model.shape.feed_forward};
  routed.loss.balance = 0.5;
  routed.loss.router_z = 0.5;
  for (const RunConfig& each : {config, routed}) {
    const Run result = run(each, 2);
    EXPECT_EQ(result.outcomes[1].empty, 3);
    EXPECT_EQ(result.outcomes[1].exit_status(), 0);
    for (const auto& event : result.steps) {
      EXPECT_EQ(event.report.loss, 0);
      EXPECT_EQ(event.report.norm, 0);
      for (const TermValue& term : event.report.terms) EXPECT_EQ(term.value, 0) << term.name;
      EXPECT_FALSE(event.report.updated);
    }
    const auto saved = list_checkpoints(checkpoint_root(each));
    ASSERT_EQ(saved.size(), 3u);
    EXPECT_TRUE(file(saved[0], "model.safetensors") == file(saved[2], "model.safetensors"));
  }
}

TEST_F(TrainerTest, ATableThatDidNotPassFailsTheRunOnAllRanks) {
  const Run result = run(tiny("run"), 2, [](World& world, TrainerHooks& hooks) {
    hooks.on_finish = [&world](FinishedRun& finished) {
      EXPECT_EQ(finished.world.rank, world.rank);
      EXPECT_EQ(finished.model.named()[0].second.size(1), 16);
      return std::vector<ReportTable>{{.title = "<parity>",
                                       .summary = "parity FAIL",
                                       .columns = {"parameter", "error"},
                                       .rows = {{"a", "1"}},
                                       .passed = world.rank != 0}};
    };
  });
  EXPECT_EQ(result.outcomes[0].exit_status(), 1);
  EXPECT_EQ(result.outcomes[1].exit_status(), 1);
  const std::string html = read_file(result.outcomes[0].report);
  EXPECT_THAT(html, HasSubstr("parity FAIL"));
  EXPECT_THAT(html, HasSubstr("&lt;parity&gt;"));
}

TEST_F(TrainerTest, WhatCannotBeTrainedIsRefusedBefore) {
  const auto refused = [&](const std::function<void(RunConfig&)>& change) {
    RunConfig config = tiny("run");
    change(config);
    return config_error_of([&] { run(config, 2); });
  };
  EXPECT_THAT(refused([](RunConfig& c) { c.model.shape.vocabulary = 257; }),
              AllOf(HasSubstr("model.vocabulary"), HasSubstr("Set model.vocabulary = 258")));
  EXPECT_THAT(refused([](RunConfig& c) { c.model.shape.max_positions = 40; }), HasSubstr("data.pack_length"));
  EXPECT_THAT(refused([&](RunConfig& c) { c.data.text = {(root_ / "absent").string()}; }),
              HasSubstr("absent"));
  EXPECT_THAT(refused([&](RunConfig& c) { c.model.load = (root_ / "absent").string(); }),
              HasSubstr("absent"));
  EXPECT_THAT(refused([&](RunConfig& c) { c.checkpoint.resume = "latest"; }),
              HasSubstr("no complete checkpoint"));
}

// A rank that has saved ends with its own status, whatever thread the signal hits.
TEST(StopSignals, OneThatComesAfterTheRunDoesNotReplaceTheStatus) {
  const auto run_then_signalled = [](bool holds) {
    if (holds) StopSignals::hold();
    {
      const StopSignals signals{RunConfig{}};
      std::thread([] { std::this_thread::sleep_for(std::chrono::minutes(1)); }).detach();
    }
    for (const int number : {SIGUSR1, SIGUSR2, SIGTERM}) ::kill(::getpid(), number);
    ::_exit(75);
  };
  EXPECT_EXIT(run_then_signalled(true), ::testing::ExitedWithCode(75), "");
  EXPECT_EXIT(run_then_signalled(false), ::testing::KilledBySignal(SIGUSR1), "");
}

TEST(StopSignals, AWishToSaveIsDroppedOnlyWhereItIsThatOfTheSaveBefore) {
  RunConfig config;
  config.run.on_signal.usr2 = "save";
  const StopSignals signals(config);
  std::raise(SIGUSR2);
  std::raise(SIGUSR2);  // through the launcher
  EXPECT_TRUE(StopSignals::take_save());
  EXPECT_FALSE(StopSignals::take_save());
  StopSignals::save_begins();
  std::raise(SIGUSR2);
  EXPECT_FALSE(StopSignals::take_save());
  std::this_thread::sleep_for(std::chrono::milliseconds(1100));
  std::raise(SIGUSR2);  // during the save
  EXPECT_TRUE(StopSignals::take_save());
}

// `isograd train ... | head`: with process ranks in tests/test_train.py.
TEST(StopSignals, OutputThatNobodyReadsIsAWriteError) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  ::close(ends[0]);
  const auto before = ::signal(SIGPIPE, SIG_DFL);  // what starts tests may ignore it
  {
    const StopSignals signals{RunConfig{}};
    EXPECT_EQ(::write(ends[1], "", 1), -1);
    EXPECT_EQ(errno, EPIPE);
  }
  EXPECT_EQ(::signal(SIGPIPE, before), SIG_DFL);
  ::close(ends[1]);
}

}  // namespace
}  // namespace isograd
