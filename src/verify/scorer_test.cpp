// verify of a scorer: every loss under every strategy is one process's, and an average is named.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "isograd/trainer.hpp"
#include "loss/ranking/ranking_testing.hpp"
#include "train/task.hpp"
#include "train/trainer_testing.hpp"
#include "verify/run.hpp"

namespace isograd {
namespace {

using ::testing::HasSubstr;

class ScorerVerify : public testing_runs::TinyRuns {
 protected:
  void SetUp() override {
    TinyRuns::SetUp();
    config_ = scorer("run");
    config_.train.steps = 3;
  }

  RunConfig config_;
};

const char* const kLosses[] = {"smooth_ap",     "recall_at_quantile", "pauc",
                               "pauc_pairwise", "sigmoid_focal",      "cross_entropy"};

// The queue is no parameter, and a rank that ranks against other rows has another gradient.
TEST_F(ScorerVerify, AQueueThatDriftsApartStopsTheRunAndIsNamed) {
  config_.ranking.loss = "smooth_ap";
  config_.verify.checksums_every = 1;
  for (const bool planted : {false, true}) {
    config_.run.directory = (root_ / (planted ? "planted" : "right")).string();
    std::vector<std::string> said(3);
    std::vector<Outcome> outcomes(3);
    run_ranks(3, [&](World& world) {
      const auto rank = static_cast<std::size_t>(world.rank);
      TrainerHooks hooks;
      hooks.check = [&](RunningRun& running) {
        if (planted && running.step == 2 && rank == 1) {
          for (auto& [name, value] : running.run.model.buffers())
            if (name == "loss.queue_scores") value.mul_(1 + 1e-6);
        }
        return said[rank] = check_running(running);
      };
      outcomes[rank] = Trainer(config_, world, hooks).run();
    });
    for (const auto& outcome : outcomes)
      EXPECT_EQ(outcome.end, planted ? Outcome::End::kRefuted : Outcome::End::kFinished);
    for (const auto& text : said)
      EXPECT_EQ(text, planted
                          ? "replicas differ in 1 parameter, first loss.queue_scores (a buffer): ranks 0, 2 "
                            "against rank 1"
                          : "");
  }
}

TEST_F(ScorerVerify, PassesForEveryLossUnderEveryStrategy) {
  for (const int ranks : {1, 3})
    for (const char* loss : kLosses) {
      config_.ranking.loss = loss;
      run_ranks(ranks, [&](World& world) {
        const Verdict verdict =
            verify_run(config_, world, ranks > 1 ? strategy_names() : std::vector<std::string>{});
        EXPECT_TRUE(verdict.passed) << (world.rank == 0 ? to_text(verdict) : "");
        if (world.rank == 0) {
          for (const auto& layout : verdict.layouts) EXPECT_EQ(layout.trajectories.size(), 2u);
          EXPECT_THAT(verdict.loss, HasSubstr(loss));
          EXPECT_GT(verdict.oracle.norm, 1e-3);
        }
      });
    }
}

// By ranks along tp, alone and with data ranks.
TEST_F(ScorerVerify, PassesWhereRanksHoldTheModelTogether) {
  config_.model.scorer_layers = 3;
  for (const auto& [ranks, tp] : {std::pair{2, 2}, {4, 2}, {5, 5}})
    for (const char* loss : kLosses) {
      config_.ranking.loss = loss;
      config_.parallel.tp = tp;
      run_ranks(ranks, [&](World& world) {
        const Verdict verdict = verify_run(config_, world, {"bucketed", "zero3"});
        EXPECT_TRUE(verdict.passed) << (world.rank == 0 ? to_text(verdict) : "");
      });
    }
}

// Planted: a bias that every rank has the whole gradient of is summed along tp all the same.
TEST_F(ScorerVerify, ABiasSummedAlongTpIsFound) {
  config_.parallel.tp = 2;
  config_.model.scorer_layers = 2;
  config_.ranking.loss = "smooth_ap";
  run_ranks(4, [&](World& world) {
    const Verdict verdict = verify_run(config_, world, {}, [](VerifyProblem& problem, World&) {
      for (LayoutUnderTest& layout : problem.layouts)
        layout.make_from_model = [make = layout.make_from_model](const VerifyModel& model, Group group) {
          Layout::Named placements = model.placed->placements();
          for (auto& [name, placement] : placements)
            if (name == "layers.1.bias") placement.summed.insert("tp");
          VerifyModel wrong = model;
          wrong.placed = std::make_shared<Layout>(model.placed->mesh(), placements);
          return make(wrong, group);
        };
    });
    EXPECT_FALSE(verdict.passed);
    if (world.rank != 0) return;
    for (const ParameterVerdict& one : verdict.layouts.at(0).parameters)
      EXPECT_EQ(one.exact.passed, one.name != "layers.1.bias") << one.name;
  });
}

// The loss of the rows of the step alone, by another twin.
void rank_without_queue(VerifyProblem& problem, World&) {
  problem.loss.global = [](const at::Tensor& logits, const at::Tensor& targets) {
    const twin::Pool pool{.scores = logits,
                          .targets = targets,
                          .iid = {},
                          .live = {},
                          .weights = at::ones({targets.numel()}, logits.options().requires_grad(false))};
    return 1 - twin::smooth_ap(pool, logits.select(1, 0), targets.eq(1), 0.3).value;
  };
}

// The museum's B24: gathered, and then averaged. The factor is W, and so it says.
TEST_F(ScorerVerify, NamesAnAverageOfGradients) {
  config_.ranking.loss = "smooth_ap";
  config_.ranking.queue_size = 0;
  config_.train.dtype = "float64";
  for (const int ranks : {2, 3, 4})
    run_ranks(ranks, [&](World& world) {
      const Verdict verdict = verify_run(config_, world, {}, [ranks](VerifyProblem& problem, World& own) {
        rank_without_queue(problem, own);
        problem.updates = 0;
        problem.make_model = [make = problem.make_model, ranks](at::ScalarType dtype) {
          VerifyModel model = make(dtype);
          model.loss_terms = [right = model.loss_terms, ranks](const Batch& batch) {
            LossTerms terms = right(batch);
            const at::Tensor value = terms[0].sum;  // its value, a W-th of its gradient
            terms[0].sum = value.detach() + (value - value.detach()) / ranks;
            return terms;
          };
          return model;
        };
      });
      EXPECT_FALSE(verdict.passed);
      if (world.rank != 0) return;
      EXPECT_THAT(verdict.diagnosis,
                  ::testing::Contains(HasSubstr(fmt::format("all parameters scaled by 1/{}", ranks))));
      EXPECT_THAT(verdict.diagnosis,
                  ::testing::Contains(HasSubstr(fmt::format("an average of {} ranks' gradients", ranks))));
    });
}

// Planted fault: an oracle that does not know of the queue is not passed, so the queue takes part.
TEST_F(ScorerVerify, RanksAgainstAFilledQueue) {
  config_.ranking.loss = "smooth_ap";
  for (const std::int64_t queue : {0, 5, 30, 1000})
    for (const bool forgets : {false, true})
      run_ranks(2, [&](World& world) {
        RunConfig config = config_;
        config.ranking.queue_size = queue;
        const Verdict verdict =
            verify_run(config, world, {}, forgets ? ChangeProblem(rank_without_queue) : ChangeProblem());
        EXPECT_EQ(verdict.passed, queue == 0 || !forgets) << queue;
      });
}

TEST_F(ScorerVerify, IsMinimisedInRowsAndQueue) {
  config_.batch.rows_per_step = 40, config_.ranking.queue_size = 100;
  config_.model.scorer_layers = 3, config_.model.scorer_units = 16;
  const auto fails = [](const Trial& trial) -> std::string {
    return trial.config.batch.rows_per_step >= 7 && trial.config.ranking.queue_size >= 3 ? "planted" : "";
  };
  const auto found = minimise({config_, 4}, fails);
  ASSERT_TRUE(found);
  const RunConfig& least = found->trial.config;
  EXPECT_EQ(found->trial.ranks, 1);
  EXPECT_EQ(least.batch.rows_per_step, 7);
  EXPECT_EQ(least.ranking.queue_size, 3);
  EXPECT_EQ(least.model.scorer_layers, 1);
  EXPECT_EQ(least.model.scorer_units, 1);
  EXPECT_EQ(least.model.shape.hidden, config_.model.shape.hidden);  // of other models
  EXPECT_EQ(least.batch.packs_per_step, config_.batch.packs_per_step);
}

}  // namespace
}  // namespace isograd
