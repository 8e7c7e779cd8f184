// Runs whose experts are dealt to ranks (parallel.ep): trained, measured, saved, resumed, sampled and proven
// as one process, and mistakes in them found.
#include <gmock/gmock.h>

#include "experts_run.hpp"
#include "isograd/error.hpp"
#include "isograd/expert_parallel.hpp"
#include "verify/layouts.hpp"
#include "verify/run.hpp"

namespace isograd {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing_runs::config_error_of;
using namespace expert_runs;

Cell dealt(int ranks, const char* strategy, std::int64_t ep, int ring = 1, std::int64_t packs = 2,
           int replicas = 1, bool checkpoint = false) {
  return {.ranks = ranks,
          .strategy = strategy,
          .ring = ring,
          .replicas = replicas,
          .packs = packs,
          .share = !checkpoint,
          .checkpoint = checkpoint,
          .ep = ep};
}

// Five experts: uneven along every ep but 5. Five packs: uneven too, with rounds in which some ranks have
// none.
const Cell kDealt[] = {dealt(2, "bucketed", 2),
                       dealt(2, "naive", 2, 1, 1),
                       dealt(3, "naive", 3, 1, 1),
                       dealt(4, "bucketed", 2, 2),
                       dealt(4, "overlapped", 4, 1, 1),
                       dealt(5, "bucketed", 5),
                       dealt(4, "bucketed", 2, 1, 1),
                       dealt(8, "bucketed", 4, 2, 1),
                       // Shards of experts along edp, of the rest along all data axes but those of replicas.
                       dealt(2, "zero1", 2, 1, 1),
                       dealt(4, "zero1", 2),
                       dealt(4, "zero2", 2, 1, 1),
                       dealt(4, "zero2", 4, 2, 1),
                       dealt(3, "zero3", 3, 1, 1),
                       dealt(4, "zero3", 2, 1, 1),
                       dealt(4, "zero1", 2, 1, 1, 2),
                       dealt(4, "zero3", 4, 1, 1, 2),
                       dealt(8, "zero3", 2, 2, 1, 2),
                       dealt(4, "zero3", 2, 1, 1, 1, true),
                       // Each expert's matrices cut along tp.
                       {.ranks = 2, .strategy = "bucketed", .tp = 2},
                       {.ranks = 4, .strategy = "zero3", .packs = 1, .ep = 2, .tp = 2}};

class ExpertsDealt : public ExpertRuns {};

TEST_F(ExpertsDealt, AreTheRunOfOneProcess) {
  for (const char* over : {"layers", "model"}) {
    RunConfig one = plain(std::string("alone-") + over);
    one.loss.balance_over = over;
    one.loss.kind = over == std::string("layers") ? "token_mean" : "sample_mean";
    const Run alone = run(one, 1);
    EXPECT_GT(std::abs(alone.steps[0].report.loss - alone.steps[6].report.loss), 1e-3);
    EXPECT_EQ(alone.steps[0].report.terms.size(), 3u);
    for (std::size_t i = 0; i < std::size(kDealt); ++i) {
      if (over == std::string("model") && i % 2 == 1) continue;  // every other one under the other readings
      const Cell& cell = kDealt[i];
      expect_same(run(cut(one, cell, over), cell.ranks), alone, 0, name_of(cell) + ", " + over);
    }
  }
  // Without losses of routers, and with a shared expert beside.
  RunConfig one = plain("alone-shared");
  one.model.shape.family = "qwen2_moe";
  one.model.shape.query_key_norm = false;
  one.model.shape.attention_bias = true;
  one.model.shape.experts.shared_feed_forward = 10;
  one.loss.balance = one.loss.router_z = 0;
  const Run alone = run(one, 1);
  for (const Cell& cell : {dealt(3, "bucketed", 3, 1, 1), dealt(4, "naive", 2)})
    expect_same(run(cut(one, cell, "shared"), cell.ranks), alone, 0, name_of(cell));
}

TEST_F(ExpertsDealt, AreProvenOnEveryLayout) {
  struct Proof {
    int ranks;
    std::vector<std::string> layouts, holds;
  };
  const Proof proofs[] = {
      {2,
       {kAllLayouts},
       {"naive", "overlapped", "bucketed:share=off", "zero1:replicas=1:share=on",
        "zero2:replicas=1:share=off", "zero3:replicas=1:share=off", "zero3:replicas=1:share=on",
        "zero3:replicas=2"}},
      {4, {"bucketed:share=on", "zero1:replicas=2:share=off", "zero3:replicas=2:share=off"}, {"zero3"}}};
  for (const Proof& proof : proofs) {
    RunConfig config = plain(fmt::format("verified-{}", proof.ranks), "float32");
    config.parallel.ep = 2;
    run_ranks(proof.ranks, [&](World& world) {
      const Verdict verdict = verify_run(config, world, proof.layouts);
      EXPECT_TRUE(verdict.passed);
      if (world.rank > 0) return;
      EXPECT_TRUE(verdict.passed) << to_text(verdict);
      for (const std::string& name : proof.holds)
        EXPECT_TRUE(std::any_of(verdict.layouts.begin(), verdict.layouts.end(),
                                [&](const LayoutVerdict& layout) { return layout.name.starts_with(name); }))
            << name;
      for (const LayoutVerdict& layout : verdict.layouts) EXPECT_GT(layout.choices.tokens, 0) << layout.name;
    });
  }
}

// Experts have copies along edp, each of which saw other tokens: their sum left out, or made of one layer
// alone, is found.
TEST_F(ExpertsDealt, ASumOverCopiesLeftOutIsFound) {
  RunConfig config = plain("not-summed", "float32");
  config.parallel.ep = 2;
  for (const auto& [which, strategy] : {std::pair{".experts.", "bucketed"},
                                        {"layers.1.mlp.experts.up_proj", "bucketed"},
                                        {"layers.1.mlp.experts.up_proj", "zero2"},
                                        {"layers.1.mlp.experts.up_proj", "zero3"}})
    run_ranks(4, [&](World& world) {
      const Verdict verdict = verify_run(config, world, {strategy}, [&](VerifyProblem& problem, World&) {
        problem.make_model = [which, make = problem.make_model](at::ScalarType dtype) {
          VerifyModel made = make(dtype);
          made.cut = [which, right = made.cut](const Mesh& mesh) {
            Layout::Named placements = right(mesh).placements();
            for (auto& [name, placement] : placements)
              if (name.find(which) != std::string::npos) placement.summed.clear();
            return Layout(mesh, placements);
          };
          return made;
        };
      });
      EXPECT_FALSE(verdict.passed);
      if (world.rank > 0) return;
      EXPECT_THAT(to_text(verdict), HasSubstr("experts")) << which;
    });
}

TEST_F(ExpertsDealt, ACheckpointGoesOnAlongAnotherAxis) {
  const Run straight = run(plain("straight"), 1);
  const Cell cells[] = {dealt(2, "bucketed", 2),       {.ranks = 3, .strategy = "zero3", .packs = 1},
                        dealt(3, "naive", 3),          dealt(4, "zero2", 2, 1, 1),
                        dealt(4, "zero3", 2, 1, 1, 2), {.ranks = 1, .strategy = "bucketed"}};
  for (const Cell& from : cells) {
    RunConfig saving = cut(plain(""), from, "saving");
    saving.checkpoint.every = 3;
    saving.checkpoint.keep = 10;
    expect_same(run(saving, from.ranks), straight, 0, "saving " + name_of(from));
    for (const Cell& to : cells) {
      if (from.ep == 1 && to.ep == 1) continue;
      RunConfig resumed = cut(plain(""), to, "resumed-from-" + name_of(from));
      resumed.checkpoint.resume = (fs::path(saving.run.directory) / "checkpoints/step-00000003").string();
      expect_same(run(resumed, to.ranks), straight, 3, name_of(from) + " to " + name_of(to));
    }
  }
}

TEST_F(ExpertsDealt, SampleAsOneProcess) {
  RunConfig one = plain("sample-alone");
  one.sample.tokens = 12;
  const std::string wanted = run(one, 1).outcomes[0].sample;
  EXPECT_FALSE(wanted.empty());
  RunConfig two = cut(one, dealt(2, "bucketed", 2), "sample");
  EXPECT_EQ(run(two, 2).outcomes[0].sample, wanted);
}

TEST_F(ExpertsDealt, WhatDoesNotFitIsRefused) {
  const auto refused = [&](const std::vector<std::string>& more) {
    std::vector<std::string> set = {"model.family=qwen3_moe", "model.query_key_norm=true", "model.experts=4",
                                    "model.expert_feed_forward=32", "parallel.ep=2"};
    set.insert(set.end(), more.begin(), more.end());
    return config_error_of([&] { parse_config("", "run.toml", set); });
  };
  EXPECT_EQ(refused({}), "no error");
  EXPECT_EQ(expert_overlap_named(RunConfig().parallel.expert_overlap), ExpertOverlap::kNone);
  EXPECT_EQ(ExpertParallelOptions().overlap, ExpertOverlap::kNone);
  EXPECT_THAT(refused({"parallel.ep=5"}), AllOf(HasSubstr("parallel.ep"), HasSubstr("at most 4")));
  EXPECT_EQ(refused({"parallel.tp=2"}), "no error");
  EXPECT_THAT(refused({"parallel.expert_overlap=both"}),
              AllOf(HasSubstr("parallel.expert_overlap"), HasSubstr("both"), HasSubstr("halves")));
  EXPECT_THAT(refused({"parallel.ep=1", "parallel.expert_overlap=halves"}),
              AllOf(HasSubstr("parallel.expert_overlap"), HasSubstr("parallel.ep is 1")));
  EXPECT_THAT(config_error_of([&] { parse_config("", "run.toml", {"parallel.ep=2"}); }),
              AllOf(HasSubstr("parallel.ep"), HasSubstr("has none")));
  EXPECT_THAT(config_error_of([&] {
                parse_config("", "run.toml", {"model.kind=video", "parallel.ep=2"});
              }),
              AllOf(HasSubstr("parallel.ep"), HasSubstr("no effect")));
  RunConfig config = plain("three");
  config.parallel.ep = 2;
  EXPECT_THAT(config_error_of([&] { run(config, 3); }),
              AllOf(HasSubstr("parallel.ep"), HasSubstr("3 ranks")));
}

}  // namespace
}  // namespace isograd
