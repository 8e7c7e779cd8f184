// Whole runs of a model whose layers lie in stages: trained, measured, sampled, saved, resumed and proven as
// one process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "full_tests.hpp"
#include "train/build.hpp"
#include "train/trainer_testing.hpp"
#include "verify/layouts.hpp"
#include "verify/run.hpp"

namespace isograd {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using testing_runs::config_error_of;

struct Cell {
  int ranks, pp;
  const char* schedule = "1f1b";
  int stages_per_rank = 1, tp = 1, ring = 1, replicas = 1, ep = 1;
  const char* strategy = "bucketed";
  std::int64_t packs = 2;  // of a micro-batch
  bool share = true;
};

std::string name_of(const Cell& c) {
  return fmt::format("{}-pp{}x{}-{}-tp{}-ring{}-replicas{}-ep{}-{}-packs{}{}", c.ranks, c.pp,
                     c.stages_per_rank, c.schedule, c.tp, c.ring, c.replicas, c.ep, c.strategy, c.packs,
                     c.share ? "" : "-own-copies");
}

class PipelineRun : public testing_runs::TinyRuns {
 protected:
  RunConfig plain(const std::string& name, const std::string& dtype = "float64") const {
    RunConfig config = tiny(name, dtype);
    config.model.shape.layers = 5;
    config.model.shape.heads = 4;
    config.model.shape.key_value_heads = 2;
    config.model.shape.head_dim = 4;
    config.sample.tokens = 30;
    config.sample.temperature = 0;  // always the likeliest: where ranks drew otherwise it would show
    config.verify.checksums_every = 1;
    return config;
  }
  // A mixture of experts in some of the layers, so that stages have other numbers of them.
  RunConfig mixed(const std::string& name, const std::string& dtype = "float64") const {
    RunConfig config = plain(name, dtype);
    auto& shape = config.model.shape;
    shape.family = "qwen3_moe";
    shape.query_key_norm = true;
    shape.experts = {.count = 4, .per_token = 2, .feed_forward = 12};
    shape.initializer_range = 0.3;
    config.model.experts_every = 2;
    config.loss.balance = 0.1;
    config.loss.router_z = 0.01;
    return config;
  }
  RunConfig cut(RunConfig config, const Cell& cell, const std::string& name) const {
    config.run.directory = (root_ / (name + name_of(cell))).string();
    config.parallel.pp = cell.pp;
    config.parallel.schedule = cell.schedule;
    config.parallel.stages_per_rank = cell.stages_per_rank;
    config.parallel.tp = cell.tp;
    config.parallel.cp_ring = cell.ring;
    config.parallel.replicas = cell.replicas;
    config.parallel.ep = cell.ep;
    config.parallel.strategy = cell.strategy;
    config.batch.packs_per_micro_batch = cell.packs;
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
      EXPECT_NEAR(a.loss, b.loss, 1e-9 * std::abs(b.loss)) << where << ", step " << i;
      EXPECT_NEAR(a.norm, b.norm, 1e-9 * std::abs(b.norm)) << where << ", step " << i;
      ASSERT_EQ(a.terms.size(), b.terms.size()) << where;
      for (std::size_t term = 0; term < b.terms.size(); ++term)
        EXPECT_NEAR(a.terms[term].value, b.terms[term].value, 1e-9 * std::abs(b.terms[term].value))
            << where << ", " << b.terms[term].name;
    }
    EXPECT_NEAR(*found.outcomes[0].validation_loss, *wanted.outcomes[0].validation_loss, 1e-9) << where;
    EXPECT_EQ(found.outcomes[0].sample, wanted.outcomes[0].sample) << where;
  }
};

constexpr Cell kCells[] = {{.ranks = 2, .pp = 2},
                           {.ranks = 2, .pp = 2, .schedule = "gpipe", .packs = 1},
                           {.ranks = 2, .pp = 2, .schedule = "interleaved", .stages_per_rank = 2, .packs = 1},
                           {.ranks = 3, .pp = 3, .schedule = "one-after-another"},
                           {.ranks = 3, .pp = 3, .schedule = "zb-h1", .packs = 1},
                           {.ranks = 2, .pp = 2, .schedule = "zb-v", .stages_per_rank = 2, .packs = 1},
                           {.ranks = 4, .pp = 2, .schedule = "zb-h1", .strategy = "zero2", .packs = 1},
                           {.ranks = 5, .pp = 5, .packs = 1},
                           {.ranks = 4, .pp = 2, .strategy = "zero1", .packs = 1},
                           {.ranks = 4, .pp = 2, .strategy = "zero2", .share = false},
                           {.ranks = 4, .pp = 2, .strategy = "zero3", .packs = 1},
                           {.ranks = 4,
                            .pp = 2,
                            .schedule = "interleaved",
                            .stages_per_rank = 2,
                            .strategy = "zero3",
                            .packs = 1,
                            .share = false},
                           {.ranks = 4, .pp = 2, .tp = 2, .strategy = "naive"},
                           {.ranks = 4, .pp = 2, .ring = 2},
                           {.ranks = 8, .pp = 2, .replicas = 2, .strategy = "zero1", .share = false}};

TEST_F(PipelineRun, IsTheRunOfOneProcess) {
  for (const char* kind : {"token_mean", "sample_mean"}) {
    RunConfig one = plain(std::string("alone-") + kind);
    one.loss.kind = kind;
    const Run alone = checked(one, 1);
    EXPECT_GT(std::abs(alone.steps[0].report.loss - alone.steps[6].report.loss), 1e-3);
    EXPECT_FALSE(alone.outcomes[0].sample.empty());
    for (const Cell& cell : kCells)
      expect_same(checked(cut(one, cell, kind), cell.ranks), alone, 0, name_of(cell) + ", " + kind);
  }
}

TEST_F(PipelineRun, OfATiedEmbedding) {
  RunConfig one = plain("alone");
  one.model.shape.tied_output = true;
  const Run alone = checked(one, 1);
  for (const Cell& cell : {Cell{.ranks = 2, .pp = 2}, Cell{.ranks = 4, .pp = 2, .strategy = "zero1"},
                           Cell{.ranks = 3, .pp = 3}, Cell{.ranks = 4, .pp = 4, .schedule = "zb-h1"},
                           Cell{.ranks = 6, .pp = 3, .strategy = "zero3", .share = false},
                           Cell{.ranks = 2, .pp = 2, .schedule = "zb-v", .stages_per_rank = 2, .packs = 1}})
    expect_same(checked(cut(one, cell, "tied"), cell.ranks), alone, 0, name_of(cell));
}

// Losses of routers are over all layers, which lie in several stages.
TEST_F(PipelineRun, OfAMixtureOfExperts) {
  for (const char* over : {"layers", "model"}) {
    RunConfig one = mixed(std::string("alone-") + over);
    one.loss.balance_over = over;
    const Run alone = checked(one, 1);
    for (const Cell& cell :
         {Cell{.ranks = 2, .pp = 2}, Cell{.ranks = 3, .pp = 3, .packs = 1},
          Cell{.ranks = 2, .pp = 2, .schedule = "interleaved", .stages_per_rank = 2, .packs = 1},
          Cell{.ranks = 3, .pp = 3, .schedule = "zb-h1", .packs = 1},
          Cell{.ranks = 2, .pp = 2, .schedule = "zb-v", .stages_per_rank = 2, .packs = 1},
          Cell{.ranks = 4, .pp = 2, .schedule = "zb-h1", .ep = 2, .packs = 1},
          Cell{.ranks = 4, .pp = 2, .ep = 2}, Cell{.ranks = 4, .pp = 2, .ep = 2, .strategy = "zero1"}}) {
      SCOPED_TRACE(name_of(cell));
      const Run found = checked(cut(one, cell, over), cell.ranks);
      expect_same(found, alone, 0, name_of(cell) + ", " + over);
      for (std::size_t i = 0; i < alone.steps.size(); ++i) {
        const auto &a = found.steps[i].expert_loads, &b = alone.steps[i].expert_loads;
        ASSERT_EQ(a.size(), b.size());
        for (std::size_t layer = 0; layer < b.size(); ++layer) {
          EXPECT_EQ(a[layer].layer, b[layer].layer) << name_of(cell);
          EXPECT_EQ(a[layer].choices, b[layer].choices) << name_of(cell);
        }
      }
    }
  }
}

// A speed and memory option, in every precision.
TEST_F(PipelineRun, SchedulesGiveTheSameBits) {
  for (const char* dtype : {"float32", "bfloat16"})
    for (const auto& [stages, schedules] :
         {std::pair{1, std::pair{"1f1b", "zb-h1"}}, {2, {"interleaved", "zb-v"}}}) {
      const auto trained = [&](const char* schedule) {
        const Cell cell{.ranks = 2, .pp = 2, .schedule = schedule, .stages_per_rank = stages, .packs = 1};
        return run(cut(mixed("x", dtype), cell, dtype), cell.ranks).outcomes[0].checkpoint;
      };
      const auto a = trained(schedules.first), b = trained(schedules.second);
      for (const char* name : {"model.safetensors", "optimizer.safetensors"})
        EXPECT_TRUE(file(a, name) == file(b, name)) << dtype << ", " << schedules.second << ", " << name;
    }
}

TEST_F(PipelineRun, ACheckpointContinuesOnAnotherMesh) {
  const RunConfig one = plain("alone");
  const Run alone = run(one, 1);
  const Cell whole{.ranks = 3, .pp = 1, .strategy = "zero3"};
  const Cell moves[][2] = {
      {{.ranks = 2, .pp = 2}, {.ranks = 3, .pp = 3}},
      {{.ranks = 4, .pp = 2, .tp = 2, .strategy = "zero1"}, whole},
      {whole, {.ranks = 4, .pp = 2, .strategy = "zero2"}},
      {{.ranks = 4, .pp = 2, .strategy = "zero3", .share = false}, {.ranks = 3, .pp = 3}},
      {{.ranks = 2, .pp = 2}, {.ranks = 4, .pp = 2, .strategy = "zero3"}}};
  for (const auto& [from, to] : moves) {
    RunConfig saving = cut(one, from, "from-" + name_of(to));
    saving.checkpoint.every = 3;
    saving.checkpoint.keep = 10;
    expect_same(run(saving, from.ranks), alone, 0, name_of(from));
    RunConfig config = cut(one, to, "to-" + name_of(from));
    config.checkpoint.resume = (fs::path(saving.run.directory) / "checkpoints/step-00000003").string();
    expect_same(run(config, to.ranks), alone, 3, name_of(from) + " to " + name_of(to));
  }
}

TEST_F(PipelineRun, SavedAndReloadedEqualsUninterrupted) {
  for (const char* dtype : {"float32", "bfloat16"}) {
    const Cell cell{.ranks = 4, .pp = 2, .strategy = "zero1"};
    const RunConfig straight_config = cut(plain("x", dtype), cell, std::string("straight-") + dtype);
    const Run straight = run(straight_config, cell.ranks);
    RunConfig saving = cut(straight_config, cell, std::string("saving-") + dtype);
    saving.checkpoint.every = 3;
    saving.checkpoint.keep = 10;
    run(saving, cell.ranks);
    RunConfig resumed = cut(straight_config, cell, std::string("resumed-") + dtype);
    const fs::path middle = fs::path(saving.run.directory) / "checkpoints/step-00000003";
    resumed.checkpoint.resume = middle.string();
    const Run again = run(resumed, cell.ranks);
    for (const char* name : {"model.safetensors", "optimizer.safetensors"})
      EXPECT_TRUE(file(again.outcomes[0].checkpoint, name) == file(straight.outcomes[0].checkpoint, name))
          << dtype << ", " << name;
  }
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

// Every layout in stages of two ranks and of two axes; a few in the others. ISOGRAD_FULL_TESTS=1: every one
// in all.
TEST_F(PipelineRun, IsProvenOnEveryLayout) {
  const auto layouts = [](const Cell& cell) -> std::vector<std::string> {
    if (full_tests() || cell.schedule == std::string("interleaved") || cell.tp > 1) return {kAllLayouts};
    return {"bucketed", "zero1", "zero3"};
  };
  for (const Cell& cell :
       {Cell{.ranks = 2, .pp = 2, .schedule = "interleaved", .stages_per_rank = 2}, Cell{.ranks = 3, .pp = 3},
        Cell{.ranks = 2, .pp = 2, .schedule = "zb-v", .stages_per_rank = 2}, Cell{.ranks = 4, .pp = 2},
        Cell{.ranks = 4, .pp = 2, .tp = 2}}) {
    const Verdict verdict = verified(cut(plain("all", "float32"), cell, "all"), cell.ranks, layouts(cell));
    EXPECT_TRUE(verdict.passed) << name_of(cell) << "\n" << to_text(verdict);
    EXPECT_GE(verdict.layouts.size(), layouts(cell).size() > 1 ? 3u : 5u);
  }
  RunConfig tied = plain("tied", "float32");
  tied.model.shape.tied_output = true;
  const Cell three{.ranks = 3, .pp = 3};
  const Verdict ends = verified(cut(tied, three, "tied"), 3, layouts(three));
  EXPECT_TRUE(ends.passed) << to_text(ends);
  const Verdict experts = verified(cut(mixed("experts", "float32"), {.ranks = 2, .pp = 2}, "experts"), 2);
  EXPECT_TRUE(experts.passed) << to_text(experts);
}

// Targets counted on stages that hold the same ones: every gradient is too small by as many as they are.
struct CountsPeers : TokenMean {
  double ranks;
  explicit CountsPeers(double ranks_) : ranks(ranks_) {}
  Denominator denominator(const Census& census) const override {
    Denominator wrong = TokenMean::denominator(census);
    wrong.value *= ranks;
    return wrong;
  }
};

TEST_F(PipelineRun, AMistakeIsFound) {
  const Cell cell{.ranks = 2, .pp = 2};
  const Verdict counted = verified(
      cut(plain("counted", "float32"), cell, "counted"), cell.ranks, {}, [](VerifyProblem& problem, World&) {
        problem.make_normalizer = [] { return std::make_unique<CountsPeers>(2); };
      });
  EXPECT_FALSE(counted.passed);
}

TEST_F(PipelineRun, IsWatchedWhileItTrains) {
  for (const char* dtype : {"float32", "bfloat16"})  // whose masters are compared too, in stages of two sizes
    for (const char* strategy : {"bucketed", "zero3"}) {
      RunConfig config =
          cut(plain("watched", dtype), {.ranks = 4, .pp = 2, .strategy = strategy, .share = false}, dtype);
      config.verify.every = 2;
      EXPECT_EQ(checked(config, 4).outcomes[0].end, Outcome::End::kFinished) << dtype << ", " << strategy;
    }
}

TEST_F(PipelineRun, WhatDoesNotFitIsRefused) {
  const auto with = [&](const Cell& cell, const std::function<void(RunConfig&)>& change = {}) {
    RunConfig config = cut(plain("refused"), cell, "refused");
    if (change) change(config);
    return config_error_of([&] { check(config, cell.ranks); });
  };
  EXPECT_THAT(with({.ranks = 6, .pp = 6}), HasSubstr("6 stages for 5 layers"));
  EXPECT_THAT(with({.ranks = 3, .pp = 2}), HasSubstr("parallel.pp"));
  EXPECT_THAT(with({.ranks = 2, .pp = 2, .schedule = "zb-h1", .strategy = "zero3"}),
              AllOf(HasSubstr("zb-h1 under zero3"), HasSubstr("1f1b"), HasSubstr("zero2")));
  EXPECT_THAT(with({.ranks = 2, .pp = 2, .schedule = "zb-v"}), HasSubstr("1 stages on each rank"));
  EXPECT_THAT(with({.ranks = 2, .pp = 2, .schedule = "interleaved"}), HasSubstr("interleaved"));
  EXPECT_THAT(with({.ranks = 2, .pp = 2, .stages_per_rank = 2}), HasSubstr("1f1b"));
  EXPECT_EQ(with({.ranks = 2, .pp = 2, .strategy = "zero3"}), "no error");
  EXPECT_EQ(with({.ranks = 2, .pp = 2}), "no error");
}

}  // namespace
}  // namespace isograd
