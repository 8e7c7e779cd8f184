#include "isograd/step.hpp"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "isograd/error.hpp"
#include "isograd/world.hpp"
#include "toy.hpp"

namespace isograd {
namespace {

// A rank's model, layout and optimizer.
struct Rank {
  toy::Model model;
  std::unique_ptr<DataParallel> layout;
  std::unique_ptr<Optimizer> optimizer;
  TokenMean mean;
  Step step;

  Rank(Group group, std::unique_ptr<Optimizer> optimizer_, StepOptions options, ForwardLossTerms forward = {})
      : layout(bucketed(trainable_parameters(model.named()), std::move(group), {.bucket_bytes = 300})),
        optimizer(std::move(optimizer_)),
        step(forward ? std::move(forward)
                     : ForwardLossTerms([this](const Batch& batch) { return terms(batch); }),
             *layout, mean, *optimizer, options) {}

  LossTerms terms(const Batch& batch) {
    return {{"cross_entropy", cross_entropy_sum(model.logits(batch), batch.targets)}};
  }
  std::vector<at::Tensor> weights() {
    std::vector<at::Tensor> copies;
    for (const at::Tensor& tensor : model.trainable()) copies.push_back(tensor.detach().clone());
    return copies;
  }
};

bool same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  for (std::size_t i = 0; i < a.size(); ++i)
    if (!at::equal(a[i], b[i])) return false;
  return true;
}

TEST(Step, ReportsGlobalCountsLossAndNorm) {
  const int size = 3;
  const auto batches = toy::make_step(size, 2);
  const auto wanted = toy::reference(toy::Model(), batches);
  const Batch whole = toy::concatenate(batches);
  double squares = 0;
  for (auto& g : wanted.gradients) squares += g.square().sum().item<double>();
  run_ranks(size, [&](World& world) {
    Rank rank(world.group, sgd({.learning_rate = 0}), {.max_norm = 0});
    const StepReport report = rank.step(batches[world.rank], world.rank == 2);
    EXPECT_NEAR(report.loss, wanted.loss, 1e-12);
    EXPECT_NEAR(report.norm, std::sqrt(squares), 1e-12);
    EXPECT_EQ(report.clip_coefficient, 1);
    EXPECT_EQ(report.census.targets, whole.num_targets());
    EXPECT_EQ(report.census.tokens, whole.num_tokens());
    EXPECT_EQ(report.census.micro_batches, 5);
    EXPECT_TRUE(report.census.stop_requested);
    EXPECT_EQ(report.census.targets_by_rank.at(1), 0);  // the rank without micro-batches
    EXPECT_TRUE(report.finite && report.updated);
    EXPECT_EQ(rank.optimizer->updates(), 1);
  });
}

TEST(Step, ClipsByTheGlobalNorm) {
  const auto batches = toy::make_step(2, 1);
  const auto wanted = toy::reference(toy::Model(), batches);
  run_ranks(2, [&](World& world) {
    Rank rank(world.group, sgd({.learning_rate = 1}), {.max_norm = 0.01});
    const auto before = rank.weights();
    const StepReport report = rank.step(batches[world.rank]);
    ASSERT_GT(report.norm, 0.02);
    EXPECT_EQ(report.clip_coefficient, 0.01 / (report.norm + 1e-6));
    const auto after = rank.weights();
    for (std::size_t i = 0; i < after.size(); ++i)
      EXPECT_LT(
          (before[i] - after[i] - report.clip_coefficient * wanted.gradients[i]).abs().max().item<double>(),
          1e-14);
    // The gradients stay as they were reduced.
    std::vector<at::Tensor> gradients;
    for (auto& view : rank.layout->views()) gradients.push_back(view.gradient);
    EXPECT_LT(toy::worst_error(gradients, wanted.gradients), 1e-10);
  });
}

TEST(Step, WithoutAnyTargetMovesNothing) {
  for (int size : {1, 2})
    run_ranks(size, [&](World& world) {
      Rank rank(world.group, adamw({.weight_decay = 0.5}), {});
      const auto before = rank.weights();
      const StepReport report = rank.step({toy::make_batch({5}, 3, /*silent=*/true)});
      EXPECT_EQ(report.loss, 0);
      EXPECT_EQ(report.norm, 0);
      EXPECT_TRUE(report.finite);
      EXPECT_FALSE(report.updated);
      EXPECT_EQ(rank.optimizer->updates(), 0);
      EXPECT_TRUE(same(before, rank.weights()));
      EXPECT_FALSE(rank.step({}).updated);  // no micro-batch anywhere
    });
}

TEST(Step, NotFiniteOnOneRankMovesNothingAnywhere) {
  const auto batches = toy::make_step(4, 2);
  for (int bad_rank : {0, 3})
    for (bool in_loss : {true, false})
      run_ranks(4, [&](World& world) {
        toy::Model* model = nullptr;
        Rank rank(world.group, adamw({}), {}, [&](const Batch& batch) -> LossTerms {
          at::Tensor sum = cross_entropy_sum(model->logits(batch), batch.targets);
          if (world.rank == bad_rank && in_loss) sum = sum * std::nan("");
          // Finite value, gradient that is not: d√x/dx at 0.
          if (world.rank == bad_rank && !in_loss)
            sum = sum + (model->gain - model->gain.detach()).sqrt().sum();
          return {{"cross_entropy", sum}};
        });
        model = &rank.model;
        const auto before = rank.weights();
        const StepReport report = rank.step(batches[world.rank]);
        EXPECT_FALSE(report.finite);
        EXPECT_FALSE(report.updated);
        EXPECT_EQ(rank.optimizer->updates(), 0);
        EXPECT_TRUE(same(before, rank.weights()));
        EXPECT_EQ(std::isfinite(report.loss), !in_loss);
      });
}

TEST(Step, TakesTheNextStepAfterARefusedOne) {
  const auto batches = toy::make_step(2, 1);
  run_ranks(2, [&](World& world) {
    bool poison = true;
    toy::Model* model = nullptr;
    Rank rank(world.group, sgd({.learning_rate = 0}), {}, [&](const Batch& batch) -> LossTerms {
      at::Tensor sum = cross_entropy_sum(model->logits(batch), batch.targets);
      return {{"cross_entropy", poison && world.rank == 1 ? sum * HUGE_VAL : sum}};
    });
    model = &rank.model;
    EXPECT_FALSE(rank.step(batches[world.rank]).finite);
    poison = false;
    const StepReport report = rank.step(batches[world.rank]);
    EXPECT_TRUE(report.updated);
    EXPECT_NEAR(report.loss, toy::reference(toy::Model(), batches).loss, 1e-12);
  });
}

TEST(Step, AcceptsAConstantOnlyWhereThereIsNoTarget) {
  toy::Model* model = nullptr;
  bool constant_everywhere = false;
  Rank rank(Group::solo(), sgd({}), {}, [&](const Batch& batch) -> LossTerms {
    if (batch.num_targets() == 0 || constant_everywhere)
      return {{"cross_entropy", at::zeros({}, at::kDouble)}};
    return {{"cross_entropy", cross_entropy_sum(model->logits(batch), batch.targets)}};
  });
  model = &rank.model;
  EXPECT_TRUE(rank.step({toy::make_batch({6}, 1), toy::make_batch({}, 2)}).updated);
  constant_everywhere = true;
  EXPECT_ANY_THROW(rank.step({toy::make_batch({6}, 1)}));
}

TEST(Step, FinishNeedsAccumulate) {
  Rank rank(Group::solo(), sgd({}), {});
  EXPECT_THROW(rank.step.finish(), ConfigError);
  rank.step.accumulate({toy::make_batch({6}, 1)});
  EXPECT_TRUE(rank.step.finish().updated);
  EXPECT_THROW(rank.step.finish(), ConfigError);
}

}  // namespace
}  // namespace isograd
