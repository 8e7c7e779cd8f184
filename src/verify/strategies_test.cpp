// Every strategy on the real model, at every number of ranks and precision, hybrid grids included: E1, E2 and
// E3.
#include <gtest/gtest.h>

#include "parallel/data/strategies_testing.hpp"
#include "train/build.hpp"
#include "train/config.hpp"
#include "verify/test_problem.hpp"

namespace isograd {
namespace {

using verify_test::Small;
using verify_test::verify_on;

struct Case {
  int ranks;
  at::ScalarType dtype;
  std::int64_t packs_per_micro_batch;  // of 7 packs a step: all at once, or accumulated
};

void PrintTo(const Case& one, std::ostream* out) {
  *out << one.ranks << " ranks, " << c10::toString(one.dtype) << ", micro-batches of "
       << one.packs_per_micro_batch;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (int ranks : {1, 2, 3, 4, 5, 8})
    for (auto dtype : {at::kFloat, at::kBFloat16})
      for (std::int64_t packs : {100, 1}) all.push_back({ranks, dtype, packs});
  return all;
}

// A model whose blocks ZeRO-3 can take; to all others it is the plain one.
VerifyModel model_in_units(const Small& small, at::ScalarType dtype) {
  VerifyModel made = verify_test::model_of(small, dtype);
  auto model = std::make_shared<DecoderLM>(small.shape(), dtype, 11);
  made.named = model->named();
  made.logits = [model](const Batch& batch) { return model->logits(batch); };
  made.units = model_units(*model, RunConfig{});
  made.loss_terms = inside(made.units->root, [model](const Batch& batch) -> LossTerms {
    return {{"cross_entropy", cross_entropy_sum(model->logits(batch), batch.targets, {})}};
  });
  return made;
}

// Every strategy with and without replicas, in place of the problem's own layout.
void take_every_layout(VerifyProblem& problem, World& world, const Small& small) {
  problem.layouts.clear();
  problem.make_model = [&small](at::ScalarType type) { return model_in_units(small, type); };
  for (int replicas : {1, 2})
    if (world.size % replicas == 0)
      problem.layouts.push_back({fmt::format("zero3, {} replicas", replicas), nullptr,
                                 [&world, replicas](const VerifyModel& model, const Group&) {
                                   return fully_shard(model.units->root, model.named, model.units->blocks,
                                                      hybrid_groups(world, replicas));
                                 }});
  for (const testing::Strategy& strategy : testing::strategies())
    for (int replicas : {1, 2}) {
      if (world.size % replicas != 0 || (replicas > 1 && strategy.stage == 0)) continue;
      problem.layouts.push_back({strategy.name + (replicas > 1 ? ", 2 replicas" : ""),
                                 [&world, strategy, replicas](auto parameters, const Group&) {
                                   return strategy.make(
                                       std::move(parameters), hybrid_groups(world, replicas),
                                       {.bucket_bytes = 16 << 10, .first_bucket_bytes = 4 << 10});
                                 }});
    }
  if (world.size > 1)
    problem.layouts.push_back({"overlapped", [](auto parameters, Group group) {
                                 return bucketed(std::move(parameters), group,
                                                 {.bucket_bytes = 1, .first_bucket_bytes = 0});
                               }});
}

class StrategiesVerified : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(All, StrategiesVerified, ::testing::ValuesIn(cases()));

TEST_P(StrategiesVerified, EqualOneProcess) {
  const auto& [ranks, dtype, packs] = GetParam();
  const Small small{.tied = ranks % 2 == 0, .packs_per_micro_batch = packs, .dtype = dtype};
  const Verdict verdict = verify_on(
      ranks, small, [&](VerifyProblem& problem, World& world) { take_every_layout(problem, world, small); });
  EXPECT_TRUE(verdict.passed) << to_text(verdict, 100);
  for (const LayoutVerdict& layout : verdict.layouts) {
    EXPECT_EQ(layout.e1.state, Grade::State::kPassed) << layout.name;
    EXPECT_LE(layout.e1.error, 1e-10) << layout.name;
    EXPECT_EQ(layout.e2.state, Grade::State::kPassed) << layout.name;
    EXPECT_EQ(layout.e3.state, Grade::State::kPassed) << layout.name;
  }
}

// Five updates in fp64, by each optimizer with a state.
class FiveUpdates : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, FiveUpdates, ::testing::Values(1, 2, 3, 4, 5, 8));

TEST_P(FiveUpdates, AreThoseOfOneProcess) {
  const Small small{.packs_per_micro_batch = GetParam() % 2 == 0 ? 1 : 100};
  for (const OptimizerOptions& optimizer :
       {OptimizerOptions(SgdOptions{.learning_rate = 0.05, .momentum = 0.9}),
        OptimizerOptions(AdamWOptions{.learning_rate = 1e-3})}) {
    const Verdict verdict = verify_on(GetParam(), small, [&](VerifyProblem& problem, World& world) {
      take_every_layout(problem, world, small);
      problem.updates = 5;
      problem.optimizer = optimizer;
    });
    EXPECT_TRUE(verdict.passed) << to_text(verdict, 100);
    for (const LayoutVerdict& layout : verdict.layouts) {
      ASSERT_EQ(layout.trajectories.size(), 2U) << layout.name;
      EXPECT_EQ(layout.trajectories[1].updates, 5) << layout.name;
      EXPECT_TRUE(layout.trajectories[1].passed) << layout.name << ": " << layout.trajectories[1].error;
    }
  }
}

}  // namespace
}  // namespace isograd
