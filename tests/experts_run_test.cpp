// Whole runs of models that send tokens to experts: trained, measured, saved, resumed and proven as one
// process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "experts_run.hpp"
#include "full_tests.hpp"
#include "isograd/error.hpp"
#include "verify/layouts.hpp"
#include "verify/run.hpp"

namespace isograd {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing_runs::config_error_of;
using namespace expert_runs;

const Cell kCells[] = {
    {2, "bucketed"},       {3, "zero1", 1, 1, 1},        {3, "zero3", 1, 1, 1, true, true}, {4, "zero2", 2},
    {4, "zero3", 1, 2, 2}, {5, "naive", 1, 1, 2, false}, {8, "zero3", 2, 2, 1, false}};

class ExpertsRun : public ExpertRuns {};

TEST_F(ExpertsRun, IsTheRunOfOneProcess) {
  for (const char* over : {"layers", "model"}) {
    RunConfig one = plain(std::string("alone-") + over);
    one.loss.balance_over = over;
    one.loss.kind = over == std::string("layers") ? "token_mean" : "sample_mean";
    const Run alone = run(one, 1);
    EXPECT_GT(std::abs(alone.steps[0].report.loss - alone.steps[6].report.loss), 1e-3);
    EXPECT_GT(term(alone.steps[0], "balance"),
              1.01);  // tokens are not spread evenly: the terms say something
    for (const Cell& cell : kCells)
      expect_same(run(cut(one, cell, over), cell.ranks), alone, 0, name_of(cell) + ", " + over);
  }
}

// Every layout under one reading of the balance loss, a few under the other. ISOGRAD_FULL_TESTS=1: all under
// both.
TEST_F(ExpertsRun, IsProvenOnEveryLayout) {
  const std::vector<std::string> all = {kAllLayouts}, some = {"bucketed", "zero2", "zero3"};
  for (const char* over : {"layers", "model"}) {
    RunConfig config = plain(std::string("verified-") + over, "float32");
    config.loss.balance_over = over;
    config.model.experts_every = over == std::string("model") ? 2 : 1;
    run_ranks(3, [&](World& world) {
      const Verdict verdict =
          verify_run(config, world, over == std::string("layers") || full_tests() ? all : some);
      EXPECT_TRUE(verdict.passed);
      if (world.rank > 0) return;
      EXPECT_TRUE(verdict.passed) << to_text(verdict);
      for (const LayoutVerdict& layout : verdict.layouts) {
        EXPECT_GT(layout.choices.tokens, 0) << layout.name;
        EXPECT_EQ(layout.choices.wrong, 0) << layout.name;
      }
    });
  }
}

// In bf16 rounding turns many choices: they are replayed, and what is left is what the bound allows.
void replay_choices_that_rounding_turns(RunConfig config) {
  config.model.shape.experts.count = 32;
  config.model.shape.initializer_range = 0.02;  // routers that hardly prefer
  config.batch.packs_per_step = 12;
  run_ranks(3, [&](World& world) {
    const Verdict verdict = verify_run(config, world, {"bucketed", "zero3"});
    if (world.rank > 0) return;
    EXPECT_TRUE(verdict.passed) << to_text(verdict);
    for (const LayoutVerdict& layout : verdict.layouts) {
      EXPECT_GT(layout.choices.flipped, 0) << layout.name;
      EXPECT_EQ(layout.choices.wrong, 0) << layout.name;
      EXPECT_GT(layout.choices.margin, 0) << layout.name;
      EXPECT_LE(layout.choices.margin, 1) << layout.name;
    }
    EXPECT_THAT(to_text(verdict), HasSubstr("near ties that rounding turned"));
  });
}
TEST_F(ExpertsRun, ChoicesThatRoundingTurnsAreReplayed) {
  replay_choices_that_rounding_turns(plain("flips", "bfloat16"));
}
TEST_F(ExpertsRun, ChoicesOfGroupsThatRoundingTurnsAreReplayed) {
  RunConfig config = with_sigmoid_routers(plain("flips-of-groups", "bfloat16"));
  config.model.shape.experts.groups = 8;
  config.model.shape.experts.groups_per_token = 3;
  replay_choices_that_rounding_turns(config);
}

// One expert to a token, whose weight is 1: the router has no gradient but rounding, and documents are apart.
TEST_F(ExpertsRun, OneNormalisedExpertIsProven) {
  RunConfig config = plain("one-expert", "float32");
  config.model.shape.experts.per_token = 1;
  config.model.shape.experts.normalise = true;
  config.loss.balance = config.loss.router_z = 0;
  run_ranks(3, [&](World& world) {
    const Verdict verdict = verify_run(config, world, {"bucketed"});
    EXPECT_TRUE(verdict.passed) << to_text(verdict);
  });
}

// A run whose routers choose others, in the run's precision alone: the margin tells it from rounding.
TEST_F(ExpertsRun, ChoicesThatRoundingDoesNotExplainFail) {
  const RunConfig config = plain("wrong", "float32");
  run_ranks(2, [&](World& world) {
    const Verdict verdict = verify_run(config, world, {"bucketed"}, [&](VerifyProblem& problem, World&) {
      problem.make_model = [&world, make = problem.make_model](at::ScalarType dtype) {
        VerifyModel made = make(dtype);
        if (dtype != at::kFloat || world.rank != 0) return made;
        // Before whatever verify asks for: the second choice of each seventh token becomes another expert.
        made.choose_experts = [choose = made.choose_experts](const DecoderLM::ChooseExperts& given) {
          choose([given](const Batch& batch, std::int64_t layer, const ExpertScores& scores,
                         const at::Tensor& likeliest) {
            at::Tensor other = likeliest.clone();
            for (std::int64_t t = 3; layer == 1 && t < other.size(0); t += 7)
              other[t][1] = scores.values[t].argmin();
            return given ? given(batch, layer, scores, other) : other;
          });
        };
        return made;
      };
    });
    EXPECT_FALSE(verdict.passed);
    if (world.rank > 0) return;
    const auto& found = verdict.layouts.at(0);
    EXPECT_GT(found.choices.wrong, 0);
    EXPECT_EQ(found.choices.layer, 1);
    EXPECT_THAT(to_text(verdict), HasSubstr("other_experts"));
  });
}

// The balance term's counts added up twice on one rank: E1 fails, and only what the routers' loss reaches is
// off.
TEST_F(ExpertsRun, RoutingCountedTwiceOnOneRankIsFound) {
  const RunConfig config = plain("twice", "float32");
  run_ranks(3, [&](World& world) {
    const Verdict verdict = verify_run(config, world, {"bucketed"}, [&](VerifyProblem& problem, World&) {
      problem.experiments = false;
      problem.make_model = [&world, make = problem.make_model](at::ScalarType dtype) {
        VerifyModel made = make(dtype);
        if (world.rank != 1) return made;
        made.look_ahead = [right = made.look_ahead](const ForwardLossTerms& forward) -> LookAhead {
          return [look = right(forward)](const MicroBatches& batches, const Group& data) {
            MicroBatches twice = batches;
            twice.insert(twice.end(), batches.begin(), batches.end());
            look(twice, data);
          };
        };
        return made;
      };
    });
    EXPECT_FALSE(verdict.passed);
    if (world.rank > 0) return;
    EXPECT_EQ(verdict.layouts.at(0).e1.state, Grade::State::kFailed);
  });
}

TEST_F(ExpertsRun, ACheckpointGoesOn) {
  for (const char* dtype : {"float32", "bfloat16"}) {
    const Cell cell{3, "zero3", 1, 1, 1};
    const Run straight = run(cut(plain("", dtype), cell, std::string("straight-") + dtype), cell.ranks);
    RunConfig saving = cut(plain("", dtype), cell, std::string("saving-") + dtype);
    saving.checkpoint.every = 3;
    saving.checkpoint.keep = 10;
    run(saving, cell.ranks);
    RunConfig resumed = cut(plain("", dtype), cell, std::string("resumed-") + dtype);
    const fs::path middle = fs::path(saving.run.directory) / "checkpoints/step-00000003";
    resumed.checkpoint.resume = middle.string();
    const Run again = run(resumed, cell.ranks);
    for (const char* name : {"model.safetensors", "optimizer.safetensors"})
      EXPECT_TRUE(file(again.outcomes[0].checkpoint, name) == file(straight.outcomes[0].checkpoint, name))
          << dtype << ", " << name;
    // A model with other experts is not this run's.
    resumed.run.directory += "-other";
    resumed.model.shape.experts.count = 6;
    EXPECT_THAT(config_error_of([&] { run(resumed, cell.ranks); }),
                AllOf(HasSubstr("model.experts"), HasSubstr("5"), HasSubstr("6")));
  }
}

// A learning rate that sends all weights out of range: the second step is refused on all ranks, and all know
// where.
TEST_F(ExpertsRun, RouterLogitsThatAreNotFiniteAreNamed) {
  for (const char* scope : {"step", "micro_batch"})
    for (const char* after : {"stop", "skip"}) {
      RunConfig config = plain(std::string("infinite-") + scope + after);
      config.optimizer.kind = "sgd";
      config.schedule.peak = 1e150;
      config.schedule.warmup = 0;
      config.loss.balance_scope = scope;
      config.verify.at_end = false;
      config.train.max_norm = 0;
      if (after == std::string("skip"))
        config.loss.balance = config.loss.router_z = 0;  // known without losses
      config.train.on_non_finite = after;
      const Run result = run(config, 3);
      for (const Outcome& outcome : result.outcomes) {
        EXPECT_THAT(outcome.not_finite, HasSubstr("the router logits of layer 0 on rank 0"))
            << scope << after;
        EXPECT_EQ(outcome.end,
                  after == std::string("stop") ? Outcome::End::kDiverged : Outcome::End::kFinished);
      }
    }
}

// Another loss on every number of ranks, which is its definition; on one rank with one micro-batch it is that
// of the step.
TEST_F(ExpertsRun, MicroBatchScopeIsTheStepsWhereThatIsOneMicroBatch) {
  RunConfig step = plain("whole-step");
  step.batch.packs_per_micro_batch = 5;
  RunConfig micro = step;
  micro.run.directory += "-micro";
  micro.loss.balance_scope = "micro_batch";
  micro.verify.at_end = false;
  const Run wanted = run(step, 1);
  expect_same(run(micro, 1), wanted, 0, "one rank");
  micro.run.directory += "-5";
  expect_same(run(micro, 5), wanted, 0, "five ranks, one pack each");
  micro.run.directory += "-2";
  micro.batch.packs_per_micro_batch = 1;  // three rounds, in the last of which one rank has nothing
  const Run cut = run(micro, 2);
  EXPECT_GT(std::abs(term(cut.steps[0], "balance") - term(wanted.steps[0], "balance")), 1e-6);
}

// Cut into the same micro-batches, stages have the loss that ranks without them have.
TEST_F(ExpertsRun, MicroBatchScopeInStagesIsThatOfTheSameMicroBatches) {
  RunConfig config = plain("one-stage");
  config.loss.balance_scope = "micro_batch";
  config.verify.at_end = false;
  config.batch.packs_per_micro_batch = 1;
  const auto in_stages = [&](int data_ranks, int stages, const std::string& schedule, std::int64_t ep = 1) {
    RunConfig own = config;
    own.run.directory = fmt::format("{}-{}-{}-{}-{}", config.run.directory, data_ranks, stages, schedule, ep);
    own.parallel.pp = stages, own.parallel.schedule = schedule, own.parallel.ep = ep;
    return run(own, data_ranks * stages);
  };
  // With two data ranks and five packs one of them ends with an empty micro-batch.
  const Run alone = run(config, 1), both = in_stages(2, 1, "1f1b");
  EXPECT_GT(std::abs(term(alone.steps[0], "balance") - term(both.steps[0], "balance")), 1e-6);
  expect_same(in_stages(1, 2, "1f1b"), alone, 0, "two stages");
  expect_same(in_stages(1, 3, "gpipe"), alone, 0, "three stages");
  expect_same(in_stages(2, 2, "1f1b"), both, 0, "two data ranks, two stages");
  expect_same(in_stages(2, 3, "zb-h1"), both, 0, "two data ranks, three stages");
  expect_same(in_stages(2, 2, "1f1b", 2), both, 0, "experts dealt, two stages");
  config.loss.balance_over = "model";
  EXPECT_THAT(config_error_of([&] { in_stages(1, 2, "1f1b"); }),
              AllOf(HasSubstr("loss.balance_scope"), HasSubstr("loss.balance_over = \"layers\"")));
}

TEST_F(ExpertsRun, WhatDoesNotFitIsRefused) {
  const auto refused = [&](const std::vector<std::string>& set) {
    return config_error_of([&] { parse_config("", "run.toml", set); });
  };
  const std::vector<std::string> good = {"model.family=qwen3_moe", "model.query_key_norm=true",
                                         "model.experts=4", "model.expert_feed_forward=32"};
  EXPECT_EQ(refused(good), "no error");
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), good.begin(), good.end());
    return refused(more);
  };
  EXPECT_THAT(with({"model.experts_per_token=5"}),
              AllOf(HasSubstr("experts_per_token"), HasSubstr("at most 4")));
  EXPECT_THAT(with({"model.family=llama"}), HasSubstr("experts"));
  EXPECT_THAT(with({"model.shared_expert_feed_forward=8"}), HasSubstr("qwen3_moe"));
  EXPECT_THAT(with({"loss.balance=0.1", "loss.balance_scope=micro_batch"}),
              AllOf(HasSubstr("loss.balance_scope"), HasSubstr("verify.at_end = false")));
  EXPECT_EQ(with({"loss.balance=0.1", "loss.balance_scope=micro_batch", "verify.at_end=false"}), "no error");
  EXPECT_THAT(with({"loss.balance=0.1", "loss.normalise_over=[\"dp_shard\", \"cp_ring\", \"cp_ulysses\"]"}),
              HasSubstr("loss.normalise_over"));
  EXPECT_THAT(with({"loss.router_z=0.1", "model.experts_every=9"}), HasSubstr("none has experts"));
  for (const char* kind : {"video", "scorer"})
    EXPECT_THAT(refused({std::string("model.kind=") + kind, "loss.router_z=0.1"}), HasSubstr("no effect"))
        << kind;
  EXPECT_THAT(with({"loss.balance_over=model"}), HasSubstr("loss.balance is 0"));
  // Ranks that were started with different rules.
  run_ranks(3, [&](World& world) {
    RunConfig own = plain("other-rules");
    if (world.rank == 1) own.model.shape.experts.per_token = 1;
    const auto other_rules =
        AllOf(HasSubstr("model.experts_per_token"), HasSubstr("1 on rank 1, 2 on rank 0"));
    EXPECT_THAT(config_error_of([&] { Trainer(own, world).run(); }), other_rules);
    EXPECT_THAT(config_error_of([&] { verify_run(own, world); }), other_rules);
  });
  // Not proven by the other way either.
  RunConfig unproven = plain("unproven");
  unproven.verify.at_end = false;
  unproven.loss.balance_scope = "micro_batch";
  run_ranks(2, [&](World& world) {
    EXPECT_THAT(config_error_of([&] { verify_run(unproven, world); }), HasSubstr("loss.balance_scope"));
  });
  EXPECT_THAT(refused({"loss.balance=0.1"}), AllOf(HasSubstr("loss.balance"), HasSubstr("none has experts")));
  EXPECT_THAT(refused({"model.family=mixtral", "model.experts=4", "model.expert_feed_forward=32"}),
              AllOf(HasSubstr("expert_feed_forward"), HasSubstr("mixtral")));
  EXPECT_THAT(config_error_of([&] {
                RunConfig config = plain("tensor");
                config.parallel.tp = 2;
                config.model.shape.experts.feed_forward = 1;
                run(config, 2);
              }),
              AllOf(HasSubstr("parallel.tp"), HasSubstr("features of an expert")));
}

}  // namespace
}  // namespace isograd
