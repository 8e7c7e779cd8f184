// The search for the smallest failing configuration, with predicates of its own; and configured runs with
// planted faults: minimised, on every layout, while training and at the end.
#include "verify/run.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "base/files.hpp"
#include "full_tests.hpp"
#include "isograd/error.hpp"
#include "planted.hpp"
#include "train/task.hpp"
#include "train/trainer_testing.hpp"
#include "verify/test_problem.hpp"

namespace isograd {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

using verify_test::verify_on;

RunConfig large() {
  RunConfig config;
  config.model.shape.layers = 12;
  config.model.shape.hidden = 384;
  config.model.shape.heads = 12;
  config.model.shape.key_value_heads = 4;
  config.model.shape.head_dim = 32;
  config.model.shape.feed_forward = 1000;
  config.batch.packs_per_step = 37;
  config.batch.packs_per_micro_batch = 2;
  config.data.pack_length = 500;
  config.parallel.strategy = "zero2";
  config.parallel.replicas = 2;
  return config;
}

TEST(Minimise, FindsTheSmallestOfEverything) {
  int asked = 0;
  const auto found = minimise({large(), 8}, [&](const Trial&) {
    ++asked;
    return std::string("always");
  });
  ASSERT_TRUE(found);
  EXPECT_EQ(found->tried, asked);
  const RunConfig& config = found->trial.config;
  EXPECT_EQ(found->trial.ranks, 1);
  EXPECT_EQ(config.model.shape.layers, 1);
  EXPECT_EQ(config.model.shape.hidden, 1);
  EXPECT_EQ(config.model.shape.heads, 1);
  EXPECT_EQ(config.model.shape.head_dim, 2);
  EXPECT_EQ(config.model.shape.feed_forward, 1);
  EXPECT_EQ(config.batch.packs_per_step, 1);
  EXPECT_EQ(config.data.pack_length, 2);
  EXPECT_EQ(config.parallel.strategy, "naive");
  EXPECT_EQ(config.parallel.replicas, 1);
  EXPECT_FALSE(config.parallel.overlap);
  EXPECT_THAT(found->changes, Contains("ranks 8 -> 1"));
  EXPECT_THAT(found->changes, Contains("model.layers 12 -> 1"));
}

TEST(Minimise, KeepsExactlyWhatTheFailureNeeds) {
  // Needs 5 packs a step at least, 3 ranks or more, 2 layers, zero2, more than one micro-batch and 17 tokens.
  const auto fails = [](const Trial& trial) -> std::string {
    const auto& batch = trial.config.batch;
    const bool failing = batch.packs_per_step >= 5 && trial.ranks >= 3 &&
                         trial.config.model.shape.layers >= 2 && trial.config.parallel.strategy == "zero2" &&
                         batch.packs_per_micro_batch * trial.ranks < batch.packs_per_step &&
                         trial.config.data.pack_length >= 17;
    return failing ? "planted" : "";
  };
  const auto found = minimise({large(), 8}, fails);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->failure, "planted");
  EXPECT_EQ(fails(found->trial), "planted");
  EXPECT_EQ(found->trial.ranks, 3);
  EXPECT_EQ(found->trial.config.batch.packs_per_step, 5);
  EXPECT_EQ(found->trial.config.model.shape.layers, 2);
  EXPECT_EQ(found->trial.config.data.pack_length, 17);
  EXPECT_EQ(found->trial.config.model.shape.hidden, 1);
  EXPECT_EQ(found->trial.config.parallel.strategy, "zero2");
  EXPECT_LT(found->tried, 200);
}

TEST(Minimise, NeverTakesAnotherFailureOrAnImpossibleConfiguration) {
  const auto fails = [](const Trial& trial) -> std::string {
    if (trial.config.model.shape.layers < 3)
      throw ConfigError({.where = "here", .found = "few", .expected = "many", .action = "Do"});
    return trial.config.model.shape.hidden < 100 ? "another" : "this";
  };
  const auto found = minimise({large(), 4}, fails);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->failure, "this");
  EXPECT_EQ(found->trial.config.model.shape.hidden, 100);
  EXPECT_EQ(found->trial.config.model.shape.layers, 3);
}

TEST(Minimise, HasNothingToDoWhereNothingFailsAndStopsWhenTold) {
  EXPECT_FALSE(minimise({large(), 4}, [](const Trial&) { return std::string(); }));
  int asked = 0;
  const auto found = minimise(
      {large(), 8},
      [&](const Trial&) {
        ++asked;
        return std::string("always");
      },
      7);
  ASSERT_TRUE(found);
  EXPECT_EQ(asked, 7);
  EXPECT_EQ(found->tried, 7);
}

TEST(Minimise, TheFileSaysTheSameAsTheTrial) {
  const auto found = minimise({large(), 8}, [](const Trial&) { return std::string("always"); });
  const std::string text = minimised_toml(*found, "small.toml");
  EXPECT_THAT(text, HasSubstr("isograd verify small.toml --ranks 1"));
  EXPECT_EQ(to_toml(parse_config(text, "small.toml")), to_toml(found->trial.config));
}

// ---- on real runs ----

class RunsVerified : public testing_runs::TinyRuns {};

// Layouts of two ranks, three of which shard.
const std::vector<std::string> kSome = {"naive",
                                        "bucketed:share=off",
                                        "bucketed:share=on",
                                        "zero1:replicas=1:share=off",
                                        "zero2:replicas=2:share=off",
                                        "zero3:replicas=1:share=on"};

const ChangeProblem kPlanted = [](VerifyProblem& problem, World&) {
  problem.make_normalizer = [] { return std::make_unique<planted::MeanOfRankMeans>(); };
};

TEST_F(RunsVerified, APlantedFaultIsMinimisedToItsLeast) {
  RunConfig config = tiny("big");
  config.model.shape.layers = 2;
  config.parallel.strategy = "zero1";
  const auto found = minimise_run(config, 4, {}, kPlanted);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->trial.ranks, 2);  // one rank's mean is the mean
  EXPECT_EQ(found->trial.config.model.shape.layers, 1);
  EXPECT_LE(found->trial.config.batch.packs_per_step, 3);  // counts must differ
  EXPECT_EQ(found->trial.config.parallel.strategy, "naive");
  // The file that was written fails as well, with the fault, and passes without.
  const auto file = root_ / "small.toml";
  write_file(file, minimised_toml(*found, file.string()));
  const RunConfig read = load_config(file);
  const auto passes = [&](const ChangeProblem& change) {
    return verify_on(found->trial.ranks, read, {}, change).passed;
  };
  EXPECT_FALSE(passes(kPlanted));
  EXPECT_TRUE(passes({}));
  EXPECT_FALSE(minimise_run(config, 2, {"bucketed", "zero3"}));
}

TEST_F(RunsVerified, ALayoutThatTheScheduleExcludesIsRefusedByName) {
  RunConfig config = tiny("halves");
  config.model.shape.layers = 4;
  config.parallel.pp = 2, config.parallel.schedule = "zb-v", config.parallel.stages_per_rank = 2;
  try {
    verify_on(2, config, {"zero2", "zero3"});
    ADD_FAILURE() << "not refused";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("zb-v under zero3"));
  }
}

// Four ranks are proved as processes, by tests/test_verify.py.
TEST_F(RunsVerified, OnEveryLayoutThatTheRanksAllow) {
  for (const int ranks : full_tests() ? std::vector<int>{1, 2, 4} : std::vector<int>{1, 2}) {
    const Verdict verdict = verify_on(ranks, tiny("all"), {kAllLayouts});
    EXPECT_TRUE(verdict.passed) << to_text(verdict);
    // naive, overlapped, bucketed with and without one copy, three sharded ones with 1, 2, 4 replicas, those
    // that leave shards also with one copy; all of it twice: another accumulation.
    const std::size_t expected[] = {0, 6, 13, 0, 19};
    EXPECT_EQ(verdict.layouts.size(), 2 * expected[ranks]) << ranks;
    std::set<std::string> names;
    for (const auto& layout : verdict.layouts) {
      names.insert(layout.name);
      ASSERT_EQ(layout.trajectories.size(), 2u) << layout.name;
      EXPECT_EQ(layout.trajectories[0].updates, 1) << layout.name;  // plain SGD
      EXPECT_EQ(layout.trajectories[1].updates, 2) << layout.name;
      EXPECT_GT(layout.trajectories[1].allowed, 0) << layout.name;
    }
    EXPECT_EQ(names.size(), verdict.layouts.size());
    EXPECT_THAT(to_text(verdict), HasSubstr(ranks == 1 ? "error" : "after 2 updates of AdamW"));
  }
  const Verdict verdict =
      verify_on(2, tiny("all"), full_tests() ? std::vector<std::string>{kAllLayouts} : kSome, kPlanted);
  EXPECT_FALSE(verdict.passed);
  for (const auto& layout : verdict.layouts) EXPECT_FALSE(layout.passed) << layout.name;
}

// ---- wrong updates of right gradients ----

// Does something to the updates of layouts whose optimizers see shards.
struct WrongOnShards : planted::WrappedOptimizer {
  using WrappedOptimizer::WrappedOptimizer;
  virtual void wrong(std::vector<Bucket>& buckets, double gradient_scale) = 0;
  void update(std::vector<Bucket>& buckets, double gradient_scale) override {
    inner->update(buckets, gradient_scale);
    const auto is_shard = [](const Bucket& bucket) { return bucket.held.size() < bucket.plan.numel; };
    if (std::ranges::any_of(buckets, is_shard)) wrong(buckets, gradient_scale);
  }
};
struct UpdatesTwice : WrongOnShards {
  using WrongOnShards::WrongOnShards;
  void wrong(std::vector<Bucket>& buckets, double gradient_scale) override {
    inner->update(buckets, gradient_scale);
  }
};
// The first moments lie one element further than the parameters they belong to, as with another padding.
struct MomentsElsewhere : WrongOnShards {
  using WrongOnShards::WrongOnShards;
  void wrong(std::vector<Bucket>& buckets, double) override {
    auto state = inner->state(buckets);
    for (auto& moments : state["exp_avg"]) moments.copy_(moments.roll(1));
  }
};

template <class Wrong>
void with_optimizer(VerifyProblem& problem, World&) {
  problem.wrap_optimizer = [](std::unique_ptr<Optimizer> inner) {
    return std::make_unique<Wrong>(std::move(inner));
  };
}

// A fault that the configured layout does not show is found on layouts that have it, and only there. The
// first fault on every layout, the second on some; ISOGRAD_FULL_TESTS=1: both on every one.
TEST_F(RunsVerified, UpdatesThatOnlyShardsGetWrongAreFoundOnEveryLayoutThatShards) {
  const auto on = [&](const std::vector<std::string>& layouts, const ChangeProblem& change) {
    RunConfig config = tiny("updates");
    config.parallel.share_parameters = "off";  // bucketed: every rank updates everything
    return verify_on(2, config, layouts, change);
  };
  struct Fault {
    ChangeProblem plant;
    const char* words;
    bool state;  // plain SGD has none
  };
  const Fault faults[] = {
      {with_optimizer<UpdatesTwice>, "what an update of plain SGD takes away is 2 times what it should be",
       false},
      {with_optimizer<MomentsElsewhere>, "parameters after 2 updates of AdamW are not", true}};
  for (const Fault& fault : faults) {
    EXPECT_TRUE(on({}, fault.plant).passed);
    const bool everywhere = full_tests() || !fault.state;
    const Verdict verdict = on(everywhere ? std::vector<std::string>{kAllLayouts} : kSome, fault.plant);
    EXPECT_FALSE(verdict.passed);
    int wrong = 0;
    for (const auto& layout : verdict.layouts) {
      const bool shards =
          layout.name.find("share=on") != std::string::npos ||
          (layout.name.starts_with("zero") && layout.name.find("replicas=1") != std::string::npos);
      wrong += shards;
      EXPECT_EQ(layout.passed, !shards) << layout.name << ", " << fault.words;
      EXPECT_EQ(layout.e1.state, Grade::State::kPassed) << layout.name;
      ASSERT_EQ(layout.trajectories.size(), 2u);
      EXPECT_EQ(layout.trajectories[0].passed, !shards || fault.state) << layout.name;
      EXPECT_EQ(layout.trajectories[1].passed, !shards) << layout.name;
      if (!shards) continue;
      ASSERT_EQ(layout.findings.size(), 1u) << layout.name;
      EXPECT_EQ(layout.findings[0].id, "optimizer_differs");
      EXPECT_THAT(layout.findings[0].sentence, HasSubstr(fault.words)) << layout.name;
    }
    EXPECT_EQ(wrong, everywhere ? 2 * 7 : 3);
  }
}

// Ranks that share samples are one replica: no layout asks for more replicas than there are data ranks.
TEST_F(RunsVerified, OnEveryLayoutOfContextRanks) {
  for (const int ranks : full_tests() ? std::vector<int>{2, 3, 4} : std::vector<int>{3, 4})
    for (const char* mode : {"all", "none"}) {
      if (!full_tests() && (ranks != 3) != (std::string(mode) == "all")) continue;  // by turns
      RunConfig config = tiny("context");
      config.parallel.cp_ring = ranks == 3 ? 3 : 2;
      config.batch.packs_per_step = ranks;
      config.parallel.cp_fsdp_mode = mode;
      const Verdict verdict = verify_on(ranks, config, {kAllLayouts});
      EXPECT_TRUE(verdict.passed) << to_text(verdict);
      EXPECT_GE(verdict.layouts.size(), 7u) << ranks << ", " << mode;
      // Every cp group has several packs, which are cut into micro-batches otherwise, too.
      EXPECT_EQ(std::count_if(verdict.layouts.begin(), verdict.layouts.end(),
                              [](const auto& layout) {
                                return layout.name.find(" to a micro-batch") != std::string::npos;
                              }),
                static_cast<std::ptrdiff_t>(verdict.layouts.size() / 2))
          << ranks << ", " << mode;
      for (const auto& layout : verdict.layouts)  // but for the last byte of each message
        EXPECT_NEAR(layout.bytes_moved, layout.bytes_needed, static_cast<double>(layout.parameters.size()))
            << layout.name;
    }
}

// ---- while training ----

std::string drift(RunningRun& run, int rank, double factor) {
  if (run.step == 4 && run.run.world.rank == rank) {
    at::NoGradGuard no_grad;
    run.run.model.named()[2].second.mul_(factor);
  }
  return check_running(run);
}

TEST_F(RunsVerified, ReplicasThatDriftApartStopTheRunAndAreNamed) {
  for (const char* strategy : {"bucketed", "zero1"})
    for (const int ranks : {2, 3}) {
      RunConfig config = tiny(std::string("drift") + strategy + std::to_string(ranks));
      config.parallel.strategy = strategy;
      config.parallel.share_parameters = "off";
      config.verify.checksums_every = 2;
      std::vector<std::string> said(static_cast<std::size_t>(ranks));
      const auto result = run(config, ranks, [&](World& world, TrainerHooks& hooks) {
        hooks.check = [&said](RunningRun& running) {
          return said[static_cast<std::size_t>(running.run.world.rank)] = drift(running, 1, 1 + 1e-6);
        };
      });
      for (const auto& outcome : result.outcomes) {
        EXPECT_EQ(outcome.end, Outcome::End::kRefuted);
        EXPECT_EQ(outcome.exit_status(), 1);
        EXPECT_EQ(outcome.steps, 4);
      }
      const auto name = DecoderLM(config.model.shape, at::kFloat, 0).named()[2].first;
      for (const auto& text : said)
        EXPECT_EQ(text, "replicas differ in 1 parameter, first " + name +
                            (ranks == 2 ? ": rank 0 against rank 1" : ": ranks 0, 2 against rank 1"));
    }
}

// The types by turns, here and below; ISOGRAD_FULL_TESTS=1: both under each strategy.
TEST_F(RunsVerified, ChecksChangeNothing) {
  std::size_t turn = 0;
  for (const char* strategy : {"bucketed", "zero3"})
    for (const char* dtype : {"float32", "bfloat16"}) {
      if (!takes_first(turn++) && !full_tests()) continue;
      RunConfig config = tiny(std::string("checked") + strategy + dtype, dtype);
      config.parallel.strategy = strategy;
      const auto plain = run(config, 2);
      config.run.directory += "-checks";
      config.verify.every = 3;
      config.verify.checksums_every = 1;
      int checks = 0;
      const auto checked = run(config, 2, [&](World& world, TrainerHooks& hooks) {
        hooks.check = [&checks, &world](RunningRun& running) {
          if (world.rank == 0) ++checks;
          return check_running(running);
        };
      });
      EXPECT_EQ(checks, 7);
      EXPECT_EQ(checked.outcomes[0].end, Outcome::End::kFinished);
      ASSERT_EQ(plain.steps.size(), checked.steps.size());
      for (std::size_t i = 0; i < plain.steps.size(); ++i) {
        EXPECT_EQ(plain.steps[i].report.loss, checked.steps[i].report.loss);
        EXPECT_EQ(plain.steps[i].report.norm, checked.steps[i].report.norm);
      }
    }
}

// The check of a run; rank 0 tells what it answers.
auto saying(std::string& said, World& world) {
  return [&said, &world](RunningRun& running) {
    const std::string text = check_running(running);
    if (world.rank == 0) said = text;
    return text;
  };
}

// Only the run itself goes wrong: a fresh layout and forward of the same weights are right.
TEST_F(RunsVerified, AFaultOfTheRunsOwnForwardIsSeenAndNamed) {
  std::size_t turn = 0;
  for (const char* strategy : {"bucketed", "zero3"})
    for (const char* dtype : {"float32", "float64"}) {
      if (!takes_first(turn++) && !full_tests()) continue;
      RunConfig config = tiny(std::string("own-forward") + strategy + dtype, dtype);
      config.parallel.strategy = strategy;
      config.verify.every = 3;
      std::string said;
      const auto result = run(config, 2, [&](World& world, TrainerHooks& hooks) {
        hooks.wrap_forward = [](const ForwardLossTerms& right) {
          return [right, calls = 0](const Batch& batch) mutable {
            LossTerms terms = right(batch);
            if (++calls > 1)
              for (auto& term : terms) term.sum = term.sum * 1.001;
            return terms;
          };
        };
        hooks.check = saying(said, world);
      });
      EXPECT_EQ(result.outcomes[0].end, Outcome::End::kRefuted) << strategy << " " << dtype;
      EXPECT_EQ(result.outcomes[0].steps, 3);
      if (dtype == std::string("float32")) {
        EXPECT_THAT(said, HasSubstr("a fresh layout has the right gradient, the run's own does not"));
      }
    }
}

// The gradient of the run under way is right, what it logs is not.
TEST_F(RunsVerified, ALossThatOnlyTheRunItselfReportsIsSeenAndNamed) {
  for (const char* dtype : {"float32", "bfloat16"}) {
    RunConfig config = tiny(std::string("logged") + dtype, dtype);
    config.verify.every = 3;
    std::string said;
    const auto result = run(config, 2, [&](World& world, TrainerHooks& hooks) {
      hooks.wrap_forward = [](const ForwardLossTerms& right) {
        return [right](const Batch& batch) {
          LossTerms terms = right(batch);
          for (auto& term : terms) term.sum = term.sum + 0.5 * term.sum.detach();
          return terms;
        };
      };
      hooks.check = saying(said, world);
    });
    EXPECT_EQ(result.outcomes[0].end, Outcome::End::kRefuted) << dtype;
    EXPECT_EQ(result.outcomes[0].steps, 3);
    EXPECT_THAT(said, HasSubstr("the run's own step reports other figures than a fresh layout: loss"));
  }
}

TEST_F(RunsVerified, AWrongGradientWhileTrainingStopsTheRun) {
  RunConfig config = tiny("refuted");
  config.verify.every = 3;
  const auto result = run(config, 3, [&](World&, TrainerHooks& hooks) {
    hooks.check = [](RunningRun& running) { return check_running(running, kPlanted); };
  });
  for (const auto& outcome : result.outcomes) {
    EXPECT_EQ(outcome.end, Outcome::End::kRefuted);
    EXPECT_EQ(outcome.steps, 3);
    EXPECT_TRUE(outcome.checkpoint.empty());
  }
}

}  // namespace
}  // namespace isograd
