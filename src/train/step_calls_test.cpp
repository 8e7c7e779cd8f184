// Steps of several calls, and what looks ahead of one.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <memory>

#include "isograd/data_parallel.hpp"
#include "isograd/fully_shard.hpp"
#include "isograd/loss.hpp"
#include "isograd/step.hpp"
#include "isograd/world.hpp"
#include "toy.hpp"

namespace isograd {
namespace {

// Cross entropy over targets, and a term over all tokens, whether they have a target or not.
LossTerms two_terms(const toy::Model& model, const Batch& batch) {
  const at::Tensor logits = model.logits(batch);
  return {{"cross_entropy", cross_entropy_sum(logits, batch.targets)},
          {"squares", logits.square().sum(), Mean::kStep, 0.1}};
}

// The whole batch in one process, with LibTorch's functions.
toy::Reference two_terms_plainly(const std::vector<MicroBatches>& by_rank, double divisor) {
  const toy::Model model;
  const Batch whole = toy::concatenate(by_rank);
  const at::Tensor logits = model.logits(whole);
  const at::Tensor loss =
      (at::cross_entropy_loss(logits, whole.targets, {}, at::Reduction::Sum, kIgnoreIndex) +
       0.1 * logits.square().sum()) /
      divisor;
  toy::Reference result;
  result.loss = loss.item<double>();
  result.gradients =
      torch::autograd::grad({loss}, model.trainable(), {}, false, false, /*allow_unused=*/true);
  return result;
}

// A call without any target on any rank, before, between and after those with some: in each order the same.
TEST(StepOfCalls, KeepsCallsWithoutTargets) {
  const auto silent = [](std::int64_t length, std::int64_t id) {
    return toy::make_batch({length}, id, true);
  };
  const std::vector<MicroBatches> of_rank_0 = {{silent(6, 1)}, {toy::make_batch({5, 3}, 2)}, {silent(2, 4)}};
  const std::vector<MicroBatches> of_rank_1 = {{silent(4, 11), silent(1, 12)}, {}, {silent(3, 13)}};
  std::vector<MicroBatches> all(2);
  for (const MicroBatches& call : of_rank_0) all[0].insert(all[0].end(), call.begin(), call.end());
  for (const MicroBatches& call : of_rank_1) all[1].insert(all[1].end(), call.begin(), call.end());
  const auto targets = static_cast<double>(toy::concatenate(all).num_targets());
  const std::vector<std::pair<double, std::function<std::unique_ptr<Normalizer>()>>> means = {
      {targets, [] { return std::make_unique<TokenMean>(); }},
      {8, [] { return std::make_unique<FixedDenominator>(8.); }},
      {1, [] { return std::make_unique<NoDenominator>(); }}};
  for (const auto& [divisor, make] : means) {
    const toy::Reference wanted = two_terms_plainly(all, divisor);
    for (const std::vector<std::size_t>& order :
         {std::vector<std::size_t>{0, 1, 2}, {1, 0, 2}, {2, 0, 1}, {1, 2, 0}})
      run_ranks(2, [&](World& world) {
        toy::Model model;
        auto layout = bucketed(trainable_parameters(model.named()), world.group, {.bucket_bytes = 300});
        auto optimizer = sgd({.learning_rate = 0.1});
        Deferred mean(make());
        Step step([&](const Batch& batch) { return two_terms(model, batch); }, *layout, mean, *optimizer,
                  {.max_norm = 0});
        for (const std::size_t call : order) step.accumulate((world.rank == 0 ? of_rank_0 : of_rank_1)[call]);
        const StepReport report = step.finish();
        EXPECT_TRUE(report.updated);
        EXPECT_NEAR(report.loss, wanted.loss, 1e-11);
        double terms = 0;
        for (const TermValue& term : report.terms) terms += (term.name == "squares" ? 0.1 : 1) * term.value;
        EXPECT_NEAR(terms, wanted.loss, 1e-11) << "logged";
        const auto views = layout->views();
        for (std::size_t i = 0; i < views.size(); ++i)
          if (wanted.gradients[i].defined()) {
            EXPECT_LT((views[i].gradient * report.gradient_scale - wanted.gradients[i]).norm().item<double>(),
                      1e-11)
                << views[i].name;
          }
      });
  }
}

TEST(StepOfCalls, OfNothingMovesNothing) {
  run_ranks(2, [](World& world) {
    toy::Model model;
    auto layout = bucketed(trainable_parameters(model.named()), world.group);
    auto optimizer = sgd({.learning_rate = 0.1});
    Deferred mean(std::make_unique<NoDenominator>());
    Step step([&](const Batch& batch) { return two_terms(model, batch); }, *layout, mean, *optimizer, {});
    step.accumulate({toy::make_batch({4}, 1, /*silent=*/true)});
    step.accumulate({});
    const at::Tensor before = model.twice.detach().clone();
    const StepReport report = step.finish();
    EXPECT_TRUE(report.finite);
    EXPECT_FALSE(report.updated);
    EXPECT_EQ(report.loss, 0);
    EXPECT_EQ(report.norm, 0);
    EXPECT_EQ(report.gradient_scale, 0);
    EXPECT_TRUE(at::equal(model.twice, before));
    EXPECT_EQ(optimizer->updates(), 0);
  });
}

struct Normalised : torch::nn::Module {
  std::shared_ptr<SyncBatchNorm> norm;
  at::Tensor weight, seen;  // `seen`: a buffer of its own that its forward changes
  explicit Normalised(Group group) {
    norm = register_module(
        "norm", std::make_shared<SyncBatchNorm>(SyncBatchNormOptions{.channels = 3}, std::move(group)));
    norm->to(at::kDouble);
    weight = register_parameter("weight", at::eye(3, at::kDouble));
    seen = register_buffer("seen", at::zeros({}, at::kLong));
  }
  at::Tensor forward(const Batch& batch) {
    if (!recomputing()) seen += batch.num_tokens();
    const at::Tensor x = batch.tokens.to(at::kDouble);
    return at::linear(norm->forward(at::stack({x * 0.1, x * x * 0.1, x.sin()}, 1)), weight);
  }
};

// Buffers after a step with a look-ahead are those after the same step without one.
TEST(LookAhead, ChangesBuffersOnce) {
  run_ranks(2, [](World& world) {
    std::vector<at::Tensor> buffers[2];
    for (const bool ahead : {false, true}) {
      auto net = std::make_shared<Normalised>(world.group);
      auto layout = bucketed(trainable_parameters(*net), world.group);
      auto optimizer = sgd({.learning_rate = 0.1});
      TokenMean mean;
      BalanceLoss balance({.experts = 3, .weight = 0.1}, world.group);
      bool collecting = false, was_recomputing = false;
      const auto forward = [&](const Batch& batch) -> LossTerms {
        const at::Tensor p = at::softmax(net->forward(batch), 1), chosen = p.argmax(1, true);
        LossTerms terms = {{"confidence", p.square().sum()}};
        if (collecting) balance.collect(chosen);
        if (collecting || !ahead) return terms;
        terms.push_back(balance.term(p, chosen));
        return terms;
      };
      StepOptions options;
      if (ahead)
        options.look_ahead = [&](const MicroBatches& micro_batches, const Group&) {
          const at::NoGradGuard no_grad;
          was_recomputing = recomputing();
          collecting = true;
          for (const Batch& batch : micro_batches) forward(batch);
          collecting = false;
          balance.finish_collecting();
        };
      Step step(forward, *layout, mean, *optimizer, options);
      step({toy::make_batch({5 + world.rank}, 1), toy::make_batch({7}, 2)});
      EXPECT_EQ(was_recomputing, ahead);
      EXPECT_FALSE(recomputing());
      EXPECT_EQ(net->norm->num_batches_tracked.item<std::int64_t>(), 2);
      for (const at::Tensor& buffer : net->buffers()) buffers[ahead].push_back(buffer.clone());
    }
    for (std::size_t i = 0; i < buffers[0].size(); ++i)
      EXPECT_TRUE(at::equal(buffers[0][i], buffers[1][i])) << i;
  });
}

}  // namespace
}  // namespace isograd
