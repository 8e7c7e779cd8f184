// verify of a scorer: every loss under every strategy is one process's, and an average is named.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <ATen/ATen.h>

#include <fstream>

#include "isograd/trainer.hpp"
#include "isograd/world.hpp"
#include "loss/ranking/ranking_testing.hpp"
#include "train/scorer_task.hpp"
#include "verify/minimise.hpp"
#include "verify/run.hpp"

namespace isograd {
namespace {

using ::testing::HasSubstr;

class ScorerVerify : public ::testing::Test {
 protected:
  ScorerVerify() {
    folder_ = std::filesystem::temp_directory_path() / ("isograd-scorer-" + std::to_string(getpid()));
    std::filesystem::create_directories(folder_);
    std::ofstream csv(folder_ / "t.csv");
    csv << "a,b,c,y\n";
    for (int row = 0; row < 61; ++row)
      csv << (row * 37 % 23) << ',' << (row * 11 % 17) * 0.5 << ',' << (row * 7 % 13) - 4 << ','
          << (row % 6 == 0) << '\n';
    config_.data.table = (folder_ / "t.csv").string();
    config_.data.validation_fraction = 0.2;
    config_.model.kind = "scorer";
    config_.model.scorer_units = 5;
    config_.batch.rows_per_step = 25;  // uneven over 2, 3 and 4 ranks
    config_.ranking.temperature = 0.3, config_.ranking.queue_size = 30, config_.ranking.budget = 0.4;
    config_.ranking.quantile = 0.3;
    config_.train.steps = 3;
    config_.run.directory = (folder_ / "run").string();
  }
  ~ScorerVerify() override { std::filesystem::remove_all(folder_); }

  std::filesystem::path folder_;
  RunConfig config_;
};

const char* const kLosses[] = {"smooth_ap",     "recall_at_quantile", "pauc",
                               "pauc_pairwise", "sigmoid_focal",      "cross_entropy"};

// The queue is no parameter, and a rank that ranks against other rows has another gradient.
TEST_F(ScorerVerify, AQueueThatDriftsApartStopsTheRunAndIsNamed) {
  config_.ranking.loss = "smooth_ap";
  config_.verify.checksums_every = 1;
  for (const bool planted : {false, true}) {
    config_.run.directory = (folder_ / (planted ? "planted" : "right")).string();
    std::vector<std::string> said(3);
    std::vector<Outcome> outcomes(3);
    run_ranks(3, [&](World& world) {
      const auto rank = static_cast<std::size_t>(world.rank);
      TrainerHooks hooks;
      hooks.check = [&](RunningRun& running) {
        if (planted && running.step == 2 && rank == 1) {
          RankingLoss& loss = *dynamic_cast<RankedTableModel&>(running.run.model).ranking_loss();
          auto state = loss.state();
          for (auto& [name, value] : state)
            if (name == "queue_scores") value.mul_(1 + 1e-6);
          loss.load_state(state);
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

// By ranks along tp, alone and beside data.
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

// The museum's B24: gathered, and then averaged. The factor is W, and so it says.
TEST_F(ScorerVerify, NamesAnAverageOfGradients) {
  const ScorerData data = open_table(config_);
  for (const int ranks : {2, 3, 4})
    run_ranks(ranks, [&](World& world) {
      const auto rows_of = [&](int rank, int size) {
        return MicroBatches{rows_batch(data, make_row_sampler(config_, data, rank, size).next())};
      };
      VerifyProblem problem;
      problem.updates = 0;
      problem.make_model = [&](at::ScalarType dtype) {
        const ScorerModel model = make_scorer(config_, data, "smooth_ap", dtype);
        const auto loss = make_ranking_loss(config_, "smooth_ap", world.group);
        loss->eval();
        VerifyModel made{.named = model.scorer->named(), .logits = {}, .loss_terms = {}};
        made.logits = [scorer = model.scorer, &data](const Batch& batch) {
          return scorer->scores(data.features.index_select(0, batch.tokens));
        };
        const auto right = scorer_loss(model, data, "smooth_ap", loss, world.group);
        made.loss_terms = [right, ranks](const Batch& batch) {
          LossTerms terms = right(batch);
          const at::Tensor value = terms[0].sum;  // its value, a W-th of its gradient
          terms[0].sum = value.detach() + (value - value.detach()) / ranks;
          return terms;
        };
        return made;
      };
      problem.local = rows_of(world.rank, world.size);
      problem.whole = [&] { return rows_of(0, 1); };
      problem.dtype = at::kDouble;
      problem.loss.name = "smooth_ap";
      problem.loss.global = [](const at::Tensor& logits, const at::Tensor& targets) {
        const twin::Pool pool{.scores = logits,
                              .targets = targets,
                              .iid = {},
                              .live = {},
                              .weights = at::ones({targets.numel()}, at::kDouble)};
        return 1 - twin::smooth_ap(pool, logits.select(1, 0), targets.eq(1), 0.3).value;
      };
      problem.layouts = {{.name = "bucketed", .make = [](std::vector<NamedParameter> named, Group group) {
                            return bucketed(std::move(named), std::move(group), {});
                          }}};
      const Verdict verdict = verify(problem, world.group);
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
  const auto forget = [](VerifyProblem& problem, World&) {
    problem.loss.global = [](const at::Tensor& logits, const at::Tensor& targets) {
      const twin::Pool pool{.scores = logits,
                            .targets = targets,
                            .iid = {},
                            .live = {},
                            .weights = at::ones({targets.numel()}, logits.options().requires_grad(false))};
      return 1 - twin::smooth_ap(pool, logits.select(1, 0), targets.eq(1), 0.3).value;
    };
  };
  for (const std::int64_t queue : {0, 5, 30, 1000})
    for (const bool forgets : {false, true})
      run_ranks(2, [&](World& world) {
        RunConfig config = config_;
        config.ranking.queue_size = queue;
        const Verdict verdict =
            verify_run(config, world, {}, forgets ? ChangeProblem(forget) : ChangeProblem());
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

TEST_F(ScorerVerify, TrainsToTheSameWeightsOnAnyNumberOfRanks) {
  config_.train.dtype = "float64";
  config_.train.steps = 6, config_.ranking.queue_size = 10, config_.ranking.compare = false;
  std::vector<at::Tensor> wanted;
  for (const auto& [ranks, tp] : {std::pair{1, 1}, {2, 1}, {4, 1}, {4, 2}}) {
    config_.overwrite = ranks > 1;
    config_.parallel.tp = tp;
    run_ranks(ranks, [&](World& world) {
      std::vector<at::Tensor> found;
      TrainerHooks hooks;
      hooks.on_finish = [&](FinishedRun& run) -> std::vector<ReportTable> {
        for (const auto& [name, tensor] : run.model.named())
          found.push_back(run.placed ? run.placed->whole(name, tensor) : tensor.detach().clone());
        const Verdict verdict = verify_finished(run);
        EXPECT_TRUE(verdict.passed) << (world.rank == 0 ? to_text(verdict) : "");
        return {{.title = "t", .summary = "s", .columns = {}, .rows = {}}};
      };
      EXPECT_EQ(Trainer(config_, world, hooks).run().exit_status(), 0);
      if (ranks == 1) wanted = found;
      for (std::size_t i = 0; i < wanted.size(); ++i)
        EXPECT_LT((found[i] - wanted[i]).norm().item<double>(), 1e-9 * (1 + wanted[i].norm().item<double>()));
    });
  }
  EXPECT_TRUE(std::filesystem::exists(folder_ / "run/report.html"));
  EXPECT_TRUE(std::filesystem::exists(folder_ / "run/metrics.jsonl"));
}

}  // namespace
}  // namespace isograd
