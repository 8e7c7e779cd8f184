// Runs with smoothed labels, the squared partition and groups of parameters: proved on layouts and meshes,
// and with planted faults refuted.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "isograd/optimizer.hpp"
#include "train/build.hpp"
#include "train/trainer_testing.hpp"
#include "verify/test_problem.hpp"

namespace isograd {
namespace {

using ::testing::HasSubstr;
using verify_test::change_model;
using verify_test::verify_on;

constexpr double kSmoothing = 0.2, kZ = 0.01;

class TermsVerified : public testing_runs::TinyRuns {
 protected:
  RunConfig with_terms(const std::string& dtype = "float32") const {
    RunConfig config = tiny("terms", dtype);
    config.model.shape.layers = 2;
    config.model.shape.initializer_range = 0.2;
    config.loss.label_smoothing = kSmoothing, config.loss.z_loss = kZ;
    config.optimizer.groups = {"*norm.weight: rate=0.5 weight_decay=0.3", "*.mlp.*: rate=2",
                               "*embed_tokens.weight: weight_decay=0"};
    return config;
  }
};

void expect_proved(const Verdict& verdict, const std::string& where) {
  EXPECT_TRUE(verdict.passed) << where << "\n" << to_text(verdict);
  EXPECT_THAT(verdict.loss, HasSubstr(", label smoothing 0.2, z-loss 0.01")) << where;
  for (const LayoutVerdict& layout : verdict.layouts) {
    EXPECT_EQ(layout.e1.state, Grade::State::kPassed) << where << " " << layout.name;
    EXPECT_EQ(layout.e2.state, Grade::State::kPassed) << where << " " << layout.name;
    EXPECT_EQ(layout.e3.state, Grade::State::kPassed) << where << " " << layout.name;
    EXPECT_FALSE(layout.trajectories.empty()) << where << " " << layout.name;
  }
}

TEST_F(TermsVerified, OnEveryStrategy) {
  for (const char* dtype : {"float32", "bfloat16"})
    expect_proved(verify_on(3, with_terms(dtype), {kAllLayouts}), dtype);
}

TEST_F(TermsVerified, OnEveryMeshOfFour) {
  for (const char* fused : {"off", "on"}) {
    RunConfig config = with_terms();
    config.loss.fused = fused;
    config.model.shape.tied_output = true;
    const Verdict verdict = verify_on(4, config, {kAllMeshes});
    expect_proved(verdict, fused);
    for (const char* axis : {"tp", "pp", "cp_ring", "cp_ulysses"})
      EXPECT_TRUE(std::ranges::any_of(verdict.meshes.tried, [&](const auto& one) {
        return one.name.find(axis) != std::string::npos;
      })) << axis;
  }
}

TEST_F(TermsVerified, UnderOtherMeansAndWithBlocksComputedAgain) {
  RunConfig config = with_terms();
  config.loss.kind = "sample_mean";
  config.parallel.strategy = "zero3", config.parallel.checkpoint_activations = true;
  expect_proved(verify_on(2, config), "sample mean");
  config.loss.kind = "fixed", config.loss.denominator = 50;
  config.optimizer.kind = "sgd", config.optimizer.momentum = 0.9;
  expect_proved(verify_on(2, config), "fixed");
}

// ---- planted ----

// Every rank along tp spreads the smoothed part over its own columns of the vocabulary, as if these were all.
// Under bf16 a step refuses such a loss: its gradient begins in 16 bits.
TEST_F(TermsVerified, SmoothingOverTheLocalColumnsIsSeen) {
  for (const std::string& dtype : {"float32", "float64"}) {
    RunConfig config = with_terms(dtype);
    config.parallel.tp = 2;
    const Verdict verdict = verify_on(2, config, {}, [](VerifyProblem& problem, World&) {
      change_model(problem, [](VerifyModel& model) {
        model.loss_terms = [right = model.loss_terms, logits = model.logits](const Batch& batch) {
          LossTerms terms = right(batch);
          const at::Tensor own = logits(batch).to(at::kDouble);  // this rank's columns
          const auto columns = static_cast<double>(own.size(1)), all = 258.0;
          if (columns < all)
            terms[0].sum = terms[0].sum - (own.sum(1) * batch.targets.ne(kIgnoreIndex)).sum() * kSmoothing *
                                              (1 / columns - 1 / all);
          return terms;
        };
      });
    });
    EXPECT_FALSE(verdict.passed) << dtype << "\n" << to_text(verdict);
    for (const LayoutVerdict& layout : verdict.layouts)
      EXPECT_EQ(layout.e1.state, Grade::State::kFailed) << layout.name;
  }
}

// One rank of three leaves the squared partition out of its loss. It calls the model a second time, which
// ZeRO-3 refuses.
TEST_F(TermsVerified, ATermThatOneRankLeavesOutIsSeen) {
  for (const char* strategy : {"bucketed", "zero2"}) {
    RunConfig config = with_terms();
    config.parallel.strategy = strategy;
    const Verdict verdict = verify_on(3, config, {}, [](VerifyProblem& problem, World& world) {
      if (world.rank != 1) return;
      change_model(problem, [](VerifyModel& model) {
        model.loss_terms = [right = model.loss_terms, logits = model.logits](const Batch& batch) {
          LossTerms terms = right(batch);
          const at::Tensor squares = logits(batch).to(at::kDouble).logsumexp(1).square();
          terms[0].sum = terms[0].sum - kZ * (squares * batch.targets.ne(kIgnoreIndex)).sum();
          return terms;
        };
      });
    });
    EXPECT_FALSE(verdict.passed) << strategy << "\n" << to_text(verdict);
    for (const LayoutVerdict& layout : verdict.layouts)
      EXPECT_EQ(layout.e1.state, Grade::State::kFailed) << layout.name;
  }
}

// The run is declared with terms that it leaves out, and the other way round.
TEST_F(TermsVerified, ATermThatIsNotDeclaredIsSeen) {
  for (const bool smoothing : {true, false}) {
    const Verdict verdict = verify_on(2, with_terms(), {}, [&](VerifyProblem& problem, World&) {
      (smoothing ? problem.loss.label_smoothing : problem.loss.z_loss) = 0;
    });
    EXPECT_FALSE(verdict.passed) << to_text(verdict);
  }
}

// The run's optimizer has a group fewer than is declared.
TEST_F(TermsVerified, AnUpdateWithoutAGroupIsSeen) {
  for (const char* kind : {"adamw", "sgd"})
    for (std::size_t left = 0; left < 3; ++left) {
      RunConfig config = with_terms(), fewer;
      config.optimizer.kind = kind;
      fewer = config;
      fewer.optimizer.groups.erase(fewer.optimizer.groups.begin() + static_cast<std::ptrdiff_t>(left));
      const Verdict verdict = verify_on(2, config, {}, [&](VerifyProblem& problem, World&) {
        problem.wrap_optimizer = [&](std::unique_ptr<Optimizer> right) {
          return right->learning_rate() == config.schedule.peak ? make_optimizer(fewer) : std::move(right);
        };
      });
      EXPECT_FALSE(verdict.passed) << kind << " " << left << "\n" << to_text(verdict);
      for (const LayoutVerdict& layout : verdict.layouts) {
        EXPECT_EQ(layout.e2.state, Grade::State::kPassed) << "the gradient is right";
        EXPECT_TRUE(std::ranges::any_of(layout.trajectories, [](const auto& one) { return !one.passed; }));
      }
    }
}

}  // namespace
}  // namespace isograd
