// Whole runs of a model that ranks hold together: trained, measured, sampled, saved and proven as one
// process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/csrc/autograd/grad_mode.h>

#include "train/build.hpp"
#include "train/task.hpp"
#include "train/video_testing.hpp"
#include "verify/layouts.hpp"
#include "verify/run.hpp"

namespace isograd {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using testing_runs::config_error_of;

struct Cell {
  int ranks, tp, ring;
  const char* strategy;
  bool sequence_parallel = true, share = true;
  const char* overlap = "none";
};

class TensorRun : public testing_runs::TinyRuns {
 protected:
  // Little that tp divides: 6 heads over 3 key heads, 29 features, a vocabulary of 259. `even`: sizes of
  // which ranks have as many, and a part that fills its bucket.
  RunConfig plain(const std::string& name, const std::string& dtype = "float64", bool even = false) const {
    RunConfig config = tiny(name, dtype);
    auto& shape = config.model.shape;
    shape.layers = 2;
    shape.hidden = 24;
    shape.heads = 6;
    shape.key_value_heads = 3;
    shape.feed_forward = even ? 120 : 29;
    shape.vocabulary = even ? 960 : 259;
    config.sample.tokens = 9;
    config.verify.checksums_every = 1;
    return config;
  }
  RunConfig cut(const Cell& cell, const std::string& name, const std::string& dtype = "float64") const {
    RunConfig config = plain(name, dtype);
    config.parallel.tp = cell.tp;
    config.parallel.cp_ring = cell.ring;
    config.parallel.strategy = cell.strategy;
    config.parallel.sequence_parallel = cell.sequence_parallel;
    config.parallel.tensor_overlap = cell.overlap;
    if (!cell.share) config.parallel.share_parameters = "off";
    return config;
  }
  // With the checks that `isograd train` makes.
  static Run checked(const RunConfig& config, int ranks) {
    return run(config, ranks, [](World&, TrainerHooks& hooks) {
      hooks.check = [](RunningRun& running) { return check_running(running); };
    });
  }
  static void expect_same(const Run& found, const Run& wanted, std::size_t skip, const std::string& where) {
    ASSERT_EQ(found.steps.size() + skip, wanted.steps.size()) << where;
    for (std::size_t i = 0; i < found.steps.size(); ++i) {
      const StepReport &a = found.steps[i].report, &b = wanted.steps[i + skip].report;
      EXPECT_EQ(a.census.targets, b.census.targets) << where;
      EXPECT_EQ(a.census.tokens, b.census.tokens) << where;
      EXPECT_EQ(a.census.samples, b.census.samples) << where;
      EXPECT_NEAR(a.loss, b.loss, 1e-9 * std::abs(b.loss)) << where << ", step " << i;
      EXPECT_NEAR(a.norm, b.norm, 1e-9 * std::abs(b.norm)) << where << ", step " << i;
    }
    EXPECT_NEAR(*found.outcomes[0].validation_loss, *wanted.outcomes[0].validation_loss, 1e-9) << where;
    EXPECT_EQ(found.outcomes[0].sample, wanted.outcomes[0].sample) << where;
  }
};

std::string name_of(const Cell& cell) {
  return fmt::format("{}-tp{}-ring{}-{}{}{}", cell.ranks, cell.tp, cell.ring, cell.strategy,
                     cell.sequence_parallel ? "" : "-whole-tokens", cell.share ? "" : "-own-copies");
}

const Cell kCells[] = {{2, 2, 1, "bucketed"},
                       {2, 2, 1, "zero3", true, true, "tokens"},
                       {3, 3, 1, "zero1", true, true, "weights"},
                       {3, 3, 1, "naive", false, false},
                       {4, 2, 1, "zero3", true, false},
                       {4, 2, 1, "zero2", false, false, "weights"},
                       {4, 2, 2, "bucketed", true, true, "tokens"},
                       {5, 5, 1, "bucketed", true, true, "tokens"},
                       {6, 6, 1, "zero3", false, true, "weights"},  // key heads along a view of tp
                       {8, 2, 2, "zero1", true, false}};

TEST_F(TensorRun, IsTheRunOfOneProcess) {
  for (const char* kind : {"token_mean", "sample_mean"}) {
    const bool even = kind == std::string("token_mean");
    RunConfig one = plain(std::string("alone-") + kind, "float64", even);
    one.loss.kind = kind;
    const Run alone = checked(one, 1);
    EXPECT_GT(std::abs(alone.steps[0].report.loss - alone.steps[6].report.loss), 1e-3);
    for (const Cell& cell : kCells) {
      RunConfig config = cut(cell, name_of(cell) + kind);
      config.loss.kind = kind;
      config.model = one.model;
      expect_same(checked(config, cell.ranks), alone, 0, name_of(cell) + ", " + kind);
    }
  }
}

TEST_F(TensorRun, ACheckpointContinuesOnAnotherMesh) {
  const Run alone = run(plain("alone"), 1);
  const Cell kWhole{3, 1, 1, "bucketed"};
  const std::pair<Cell, Cell> moves[] = {{{4, 2, 1, "zero3", true, false}, {3, 3, 1, "bucketed"}},
                                         {{5, 5, 1, "naive", false}, kWhole},
                                         {kWhole, {6, 6, 1, "zero1", true, false}}};
  for (const auto& [from, to] : moves) {
    RunConfig saving = cut(from, "from-" + name_of(from) + name_of(to));
    saving.checkpoint.every = 3;
    saving.checkpoint.keep = 10;
    const Run saved = run(saving, from.ranks);
    expect_same(saved, alone, 0, name_of(from));
    RunConfig config = cut(to, "to-" + name_of(from) + name_of(to));
    config.checkpoint.resume = (fs::path(saving.run.directory) / "checkpoints/step-00000003").string();
    expect_same(run(config, to.ranks), alone, 3, name_of(from) + " to " + name_of(to));
  }
}

TEST_F(TensorRun, SavedAndReloadedEqualsUninterrupted) {
  for (const char* dtype : {"float32", "bfloat16"}) {
    const Cell cell{4, 2, 1, "zero1", true, false};
    const Run straight = run(cut(cell, std::string("straight-") + dtype, dtype), cell.ranks);
    RunConfig saving = cut(cell, std::string("saving-") + dtype, dtype);
    saving.checkpoint.every = 3;
    saving.checkpoint.keep = 10;
    run(saving, cell.ranks);
    RunConfig resumed = cut(cell, std::string("resumed-") + dtype, dtype);
    const fs::path middle = fs::path(saving.run.directory) / "checkpoints/step-00000003";
    resumed.checkpoint.resume = middle.string();
    const Run again = run(resumed, cell.ranks);
    for (const char* name : {"model.safetensors", "optimizer.safetensors"}) {
      EXPECT_TRUE(file(again.outcomes[0].checkpoint, name) == file(straight.outcomes[0].checkpoint, name))
          << dtype << ", " << name;
      EXPECT_FALSE(file(middle, name) == file(again.outcomes[0].checkpoint, name)) << "it did not move";
    }
  }
}

// A directory of Hugging Face's form, whoever wrote it, and from one, however it is cut.
TEST_F(TensorRun, LoadsAndWritesHuggingFaceDirectories) {
  const Run first = run(plain("first"), 1);
  const auto loading = [&](RunConfig config) {
    config.model = RunConfig{}.model;
    config.model.load = first.outcomes[0].checkpoint.string();
    return config;
  };
  const Run alone = run(loading(plain("alone")), 1);
  const Cell cell{6, 6, 1, "zero3", true, false};
  expect_same(run(loading(cut(cell, "cut")), cell.ranks), alone, 0, "loaded");
}

Verdict verified(const RunConfig& config, int ranks, const std::vector<std::string>& layouts = {},
                 const ChangeProblem& change = {}) {
  Verdict verdict;
  run_ranks(ranks, [&](World& world) {
    Verdict own = verify_run(config, world, layouts, change);
    if (world.rank == 0) verdict = std::move(own);
  });
  return verdict;
}

TEST_F(TensorRun, IsProvenOnEveryLayout) {
  for (const Cell& cell :
       {Cell{2, 2, 1, "bucketed"}, Cell{4, 2, 1, "zero1", false}, Cell{6, 6, 1, "zero3"}}) {
    const Verdict verdict = verified(cut(cell, "all", "float32"), cell.ranks, {kAllLayouts});
    EXPECT_TRUE(verdict.passed) << to_text(verdict);
    EXPECT_GE(verdict.layouts.size(), 12u);
  }
}

// Targets counted on ranks that hold the same ones: every gradient is too small by as many as they are.
struct CountsPeers : TokenMean {
  double ranks;
  explicit CountsPeers(double ranks_) : ranks(ranks_) {}
  Denominator denominator(const Census& census) const override {
    Denominator wrong = TokenMean::denominator(census);
    wrong.value *= ranks;
    return wrong;
  }
};

TEST_F(TensorRun, AMistakeIsFound) {
  const Cell cell{4, 2, 1, "bucketed"};
  const Verdict counted =
      verified(cut(cell, "counted", "float32"), cell.ranks, {}, [](VerifyProblem& problem, World&) {
        problem.make_normalizer = [] { return std::make_unique<CountsPeers>(2); };
      });
  EXPECT_FALSE(counted.passed);
  // A seam left out: the model is cut as if tokens were whole between the products, and norms are not summed.
  const Verdict unsummed =
      verified(cut(cell, "unsummed", "float32"), cell.ranks, {}, [](VerifyProblem& problem, World&) {
        for (LayoutUnderTest& layout : problem.layouts)
          layout.make_from_model = [make = layout.make_from_model](const VerifyModel& model, Group group) {
            Layout::Named placements = model.placed->placements();
            for (auto& [name, placement] : placements)
              if (name.ends_with("input_layernorm.weight")) placement.summed.erase("tp");
            VerifyModel wrong = model;
            wrong.placed = std::make_shared<Layout>(model.placed->mesh(), placements);
            return make(wrong, group);
          };
      });
  EXPECT_FALSE(unsummed.passed);
  for (const ParameterVerdict& one : unsummed.layouts.at(0).parameters)
    EXPECT_EQ(one.exact.passed, !one.name.ends_with("input_layernorm.weight")) << one.name;
}

// While training, a step of the living layout is proven too, and copies along tp are compared.
TEST_F(TensorRun, IsWatchedWhileItTrains) {
  RunConfig config = cut({4, 2, 1, "zero3", true, false}, "watched", "float32");
  config.verify.every = 2;
  EXPECT_EQ(checked(config, 4).outcomes[0].end, Outcome::End::kFinished);
  const Cell cell{4, 2, 1, "bucketed", true, false};
  const auto with_other_bit = [&](const std::string& parameter, const std::string& name) {
    return run(cut(cell, name, "float32"), 4, [&](World& world, TrainerHooks& hooks) {
      hooks.check = [parameter, rank = world.rank](RunningRun& running) {
        const at::NoGradGuard no_grad;
        for (auto& [own, tensor] : running.run.model.named())
          if (own == parameter && rank == 3 && running.step == 2) tensor.flatten()[0] += 1;
        return check_running(running);
      };
    });
  };
  for (const char* parameter : {"model.norm.weight", "model.layers.1.mlp.down_proj.weight"}) {
    const Run stopped = with_other_bit(parameter, parameter);
    EXPECT_EQ(stopped.outcomes[0].end, Outcome::End::kRefuted) << parameter;
    EXPECT_EQ(stopped.outcomes[0].steps, 2) << parameter;
  }
}

class TensorVideoRun : public testing_runs::TinyVideos {};

TEST_F(TensorVideoRun, IsTheRunOfOneProcess) {
  RunConfig plain = videos("alone", "float64");
  plain.model.shape.layers = 2;
  plain.model.shape.feed_forward = 29;
  const Run alone = run(plain, 1);
  for (const auto& [ranks, tp, ring, strategy, by_tokens] : {std::tuple{2, 2, 1, "bucketed", true},
                                                             {3, 3, 1, "zero3", false},
                                                             {4, 4, 1, "zero1", true},
                                                             {4, 2, 2, "zero3", true},
                                                             {6, 3, 1, "naive", false}}) {
    RunConfig config = plain;
    config.run.directory = (root_ / fmt::format("{}-{}-{}", ranks, tp, ring)).string();
    config.parallel.tp = tp;
    config.parallel.cp_ring = ring;
    config.parallel.strategy = strategy;
    config.parallel.sequence_parallel = by_tokens;
    const Run found = run(config, ranks);
    ASSERT_EQ(found.steps.size(), alone.steps.size());
    for (std::size_t i = 0; i < alone.steps.size(); ++i) {
      const StepReport &a = found.steps[i].report, &b = alone.steps[i].report;
      EXPECT_EQ(a.census.tokens, b.census.tokens) << config.run.directory;
      EXPECT_NEAR(a.loss, b.loss, 1e-9 * b.loss) << config.run.directory << ", step " << i;
      EXPECT_NEAR(a.norm, b.norm, 1e-9 * b.norm) << config.run.directory << ", step " << i;
    }
    EXPECT_NEAR(*found.outcomes[0].validation_loss, *alone.outcomes[0].validation_loss, 1e-9);
    const Verdict verdict = verified(config, ranks);
    EXPECT_TRUE(verdict.passed) << to_text(verdict);
    // A checkpoint of it goes on without tp.
    RunConfig going_on = plain;
    going_on.run.directory += fmt::format("-after-{}-{}-{}", ranks, tp, ring);
    going_on.model = RunConfig{}.model;
    going_on.model.kind = "video";
    going_on.model.load = found.outcomes[0].checkpoint.string();
    EXPECT_LT(run(going_on, 1).steps[0].report.loss, alone.steps[0].report.loss);
  }
}

TEST_F(TensorRun, WhatDoesNotFitIsRefused) {
  const auto refused = [&](const Cell& cell, int ranks) {
    return config_error_of([&] { run(cut(cell, "refused"), ranks); });
  };
  EXPECT_THAT(refused({7, 7, 1, "bucketed"}, 7), HasSubstr("7 ranks for 6 query heads; expected at most 6"));
  EXPECT_THAT(refused({4, 3, 1, "bucketed"}, 4), HasSubstr("parallel.tp: found 3 for 4 ranks"));
  RunConfig ulysses = cut({4, 2, 1, "bucketed"}, "ulysses");
  ulysses.parallel.cp_ulysses = 2;
  EXPECT_THAT(config_error_of([&] { run(ulysses, 4); }), HasSubstr("parallel.cp_ulysses"));
  EXPECT_THAT(refused({2, 2, 1, "bucketed", false, true, "tokens"}, 2),
              HasSubstr("parallel.tensor_overlap: found tokens, and parallel.sequence_parallel off"));
  for (const char* key : {"sequence_parallel = false", "tensor_overlap = \"weights\""})
    EXPECT_THAT(config_error_of([&] { parse_config(fmt::format("[parallel]\n{}\n", key), "a.toml"); }),
                HasSubstr("parallel.tp is 1"));
  EXPECT_THAT(config_error_of([&] { parse_config("[parallel]\ntensor_overlap = \"both\"\n", "a.toml"); }),
              HasSubstr("parallel.tensor_overlap"));
}

}  // namespace
}  // namespace isograd
