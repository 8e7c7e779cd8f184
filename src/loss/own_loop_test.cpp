#include "isograd/loss.hpp"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "base/error_testing.hpp"
#include "isograd/error.hpp"
#include "isograd/group.hpp"
#include "isograd/world.hpp"

namespace isograd {
namespace {

using error_testing::error_of;
using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;

Batch batch_of(std::int64_t valid, std::int64_t ignored = 0, std::int64_t id = 1) {
  Batch batch = empty_batch();
  batch.targets = at::cat({at::ones({valid}, at::kLong), at::full({ignored}, kIgnoreIndex, at::kLong)});
  batch.tokens = batch.positions = at::zeros({valid + ignored}, at::kLong);
  batch.cu_seqlens = {0, valid + ignored};
  batch.sample_ids = {id};
  batch.sample_targets = {valid};
  return batch;
}

at::Tensor parameter(double value) { return at::full({}, value, at::kDouble).requires_grad_(true); }

TEST(CountValidTokens, AddsMicroBatchesAndRanks) {
  run_ranks(3, [](World& world) {
    const MicroBatches own = world.rank == 1
                                 ? MicroBatches{}
                                 : MicroBatches{batch_of(4 + world.rank, 3), batch_of(1), empty_batch()};
    EXPECT_EQ(count_valid_tokens(own, world.group), 5 + 7);
  });
}

// 900 tokens of loss 1 and 100 of loss 11, as means, in two calls a rank; a gradient of mean · n_k / N.
TEST(GradientAccumulateLoss, IsTheTokenMean) {
  run_ranks(2, [](World& world) {
    at::Tensor x = parameter(1);
    const double level = world.rank == 0 ? 1 : 11;
    const std::int64_t valid = world.rank == 0 ? 450 : 50;
    double loss = 0;
    for (int i = 0; i < 2; ++i) {
      const at::Tensor share = gradient_accumulate_loss(x * level, valid, 1000, world.group);
      share.backward();
      loss += share.item<double>();
    }
    EXPECT_DOUBLE_EQ(loss, 2.0);  // the same on both ranks
    EXPECT_DOUBLE_EQ(x.grad().item<double>(), level * 2 * static_cast<double>(valid) / 1000);
    at::Tensor gradient = x.grad().clone();
    world.group.all_reduce(gradient);
    EXPECT_DOUBLE_EQ(gradient.item<double>(), 2.0);
  });
}

TEST(GradientAccumulateLoss, OfNoTokensIsExactlyZeroThoughItsMeanIsNaN) {
  run_ranks(2, [](World& world) {
    at::Tensor x = parameter(3);
    const at::Tensor mean = world.rank == 0 ? x * 2 : x * std::nan("");
    const at::Tensor share = gradient_accumulate_loss(mean, world.rank == 0 ? 5 : 0, 5, world.group);
    EXPECT_EQ(share.item<double>(), 6);
    share.backward();
    EXPECT_EQ(x.grad().defined() ? x.grad().item<double>() : 0, world.rank == 0 ? 2 : 0);
    at::Tensor y = parameter(3);
    for (const at::Tensor& nothing : {y * std::nan(""), y * 7}) {
      const at::Tensor of_none = gradient_accumulate_loss(nothing, 0, 0, world.group);
      EXPECT_EQ(of_none.item<double>(), 0);
      of_none.backward();
      EXPECT_FALSE(y.grad().defined());
    }
  });
}

// However people write a mean over nothing: the derivative of each is 0 / 0. What the forward exchanges with
// other ranks is exchanged in backward too, or those would wait.
TEST(GradientAccumulateLoss, OfNoTokensLeavesNoNaNHoweverTheMeanIsWritten) {
  const at::Tensor rows = at::sin(at::arange(12, at::kDouble)).view({4, 3});
  const at::Tensor start = at::cos(at::arange(15, at::kDouble)).view({3, 5});
  for (int kind = 0; kind < 4; ++kind)
    for (const bool exchanged : {false, true})
      run_ranks(3, [&](World& world) {
        const auto mean_of = [&](const at::Tensor& weight, const at::Tensor& targets, Group* over) {
          at::Tensor x = rows.matmul(weight);
          // Each rank's logits reach the others, as attention over context ranks lets them.
          if (over) x = x + differentiable::all_reduce(*over, x.slice(1, 0, 1));
          const at::Tensor mask = targets.ne(kIgnoreIndex);
          const at::Tensor nll =
              -at::log_softmax(x, 1).gather(1, targets.clamp_min(0).unsqueeze(1)).squeeze(1);
          switch (kind) {
            case 0: return at::cross_entropy_loss(x, targets);
            case 1: return nll.index({mask}).mean();
            case 2: return (nll * mask).sum() / mask.sum();
            default: return at::where(mask, nll, 0.0).sum() / mask.sum().item<double>();
          }
        };
        const bool empty = world.rank == 1;
        const at::Tensor targets =
            empty ? at::full({4}, kIgnoreIndex, at::kLong) : at::arange(4) + world.rank / 2;
        at::Tensor weight = start.clone().requires_grad_(true);
        const at::Tensor mean = mean_of(weight, targets, exchanged ? &world.group : nullptr);
        EXPECT_EQ(std::isnan(mean.item<double>()), empty);
        gradient_accumulate_loss(mean, empty ? 0 : 4, 8, world.group).backward();
        EXPECT_EQ(weight.grad().defined(), !empty || exchanged);
        sync_context_gradients({weight}, world.group);
        // One process: both ranks' tokens, and the empty rank's part in their logits.
        at::Tensor alone = start.clone().requires_grad_(true);
        at::Tensor x = rows.matmul(alone);
        if (exchanged) x = x + 3 * x.slice(1, 0, 1);
        at::cross_entropy_loss(at::cat({x, x}), at::cat({at::arange(4), at::arange(4) + 1})).backward();
        EXPECT_LT((weight.grad() - alone.grad()).norm().item<double>(), 1e-14) << kind << exchanged;
      });
}

// An embedding with `sparse` leaves a gradient that no rank could add to another's as it is.
TEST(SyncContextGradients, TakesSparseGradientsOrNone) {
  run_ranks(3, [](World& world) {
    at::Tensor table = at::ones({4, 2}, at::kDouble).requires_grad_(true);
    if (world.rank < 2)
      at::embedding(table, at::arange(1 + world.rank), -1, false, /*sparse=*/true).sum().backward();
    sync_context_gradients({table}, world.group);
    const at::Tensor wanted = at::tensor({2., 2., 1., 1., 0., 0., 0., 0.}, at::kDouble).view({4, 2});
    EXPECT_TRUE(at::equal(table.grad(), wanted)) << table.grad();
  });
}

// A loop that reads the gradients afterwards runs on any number of ranks.
TEST(SyncContextGradients, LeavesTheSameKindOfGradientOnAnyNumberOfRanks) {
  for (const int ranks : {1, 3})
    run_ranks(ranks, [](World& world) {
      const at::Tensor idle = at::ones({2}, at::kDouble).requires_grad_(true);
      const at::Tensor table = at::ones({4, 2}, at::kDouble).requires_grad_(true);
      at::embedding(table, at::arange(1), -1, false, /*sparse=*/true).sum().backward();
      sync_context_gradients({idle, table}, world.group);
      ASSERT_TRUE(idle.grad().defined());
      EXPECT_TRUE(at::equal(idle.grad(), at::zeros({2}, at::kDouble)));
      ASSERT_EQ(table.grad().layout(), at::kStrided);
      EXPECT_EQ(table.grad().sum().item<double>(), 2.0 * world.size);
    });
}

// n_k / N rounded to bf16 is off by up to 2^-9, another amount in each micro-batch.
TEST(GradientAccumulateLoss, RefusesAMeanIn16Bits) {
  Group alone = Group::solo();
  at::Tensor x = at::ones({3}, at::kBFloat16).requires_grad_(true);
  const auto refusal = [&](const at::Tensor& mean, std::int64_t valid) {
    return error_of<Error>([&] { gradient_accumulate_loss(mean, valid, 7, alone); });
  };
  EXPECT_THAT(refusal((x * 2).mean(), 3), HasSubstr("begins in 16 bits"));
  EXPECT_THAT(refusal((x * 2).mean().to(at::kFloat), 3), HasSubstr("begins in 16 bits"));
  EXPECT_THAT(refusal((x * 2).to(at::kFloat).mean(), 3), HasSubstr("begins in 16 bits"));
  const at::Tensor mask = at::ones({3});
  EXPECT_THAT(refusal(((x * 2).to(at::kFloat) * mask).sum() / mask.sum(), 3), HasSubstr("begins in 16 bits"));
  EXPECT_THAT(refusal((x * 2 * mask).sum() / mask.sum(), 3), HasSubstr("begins in 16 bits"));
  EXPECT_EQ(refusal(((x.to(at::kFloat) * 2).square() * mask).sum() / mask.sum(), 3), "no error");
  EXPECT_EQ(refusal((x.to(at::kFloat) * 2).mean(), 3), "no error");
  EXPECT_EQ(refusal((x * 2).mean(), 0), "no error") << "nothing is divided";
}

// One rank has tokens. Ranks without, or with a constant in place of a micro-batch, do not wait for it.
TEST(GradientAccumulateLoss, RefusesAMeanIn16BitsOnAllRanks) {
  run_ranks(4, [](World& world) {
    at::Tensor x = at::ones({3}, at::kBFloat16).requires_grad_(true);
    const at::Tensor mean = world.rank == 3 ? at::zeros({}) : (x * 2).mean();
    const std::string error = error_of<Error>(
        [&] { gradient_accumulate_loss(mean, world.rank < 2 ? 3 + world.rank : 0, 7, world.group); });
    EXPECT_THAT(error, AllOf(HasSubstr("ConfigError"), HasSubstr("begins in 16 bits")));
    EXPECT_EQ(error.find("on another rank") != std::string::npos, world.rank >= 2);
    EXPECT_EQ(error_of<Error>([&] { gradient_accumulate_loss(parameter(1), 1, 4, world.group); }),
              "no error");
  });
}

TEST(GradientAccumulateLoss, RefusesBadCountsAndASecondDivision) {
  Group alone = Group::solo();
  at::Tensor x = parameter(1);
  EXPECT_THAT(error_of<Error>([&] { gradient_accumulate_loss(x, 6, 5, alone); }),
              HasSubstr("6 valid tokens here of 5"));
  EXPECT_THAT(error_of<Error>([&] { gradient_accumulate_loss(x, -1, 5, alone); }), HasSubstr("-1 valid"));
  EXPECT_THAT(error_of<Error>([&] { gradient_accumulate_loss(at::ones({2}), 1, 5, alone); }),
              HasSubstr("shape [2]"));
  const at::Tensor share = gradient_accumulate_loss(x * 1, 2, 5, alone);
  EXPECT_THAT(error_of<Error>([&] { gradient_accumulate_loss(share, 2, 5, alone); }),
              HasSubstr("divided already"));
}

TEST(GradientAccumulateLoss, NamesAnUnequalNumberOfCalls) {
  // Rank 1 has gone on to the reduction of its gradients.
  std::vector<std::string> errors(2);
  try {
    run_ranks(2,
              [&](World& world) {
                const auto call = [&] { gradient_accumulate_loss(parameter(1), 1, 4, world.group); };
                call();
                errors[static_cast<std::size_t>(world.rank)] = error_of<Error>([&] {
                  if (world.rank == 0) return call();
                  at::Tensor gradient = at::zeros({100});
                  world.group.all_reduce(gradient);
                });
              },
              {.timeout = 10s});
  } catch (const Error&) {
  }
  EXPECT_THAT(errors[0],
              AllOf(HasSubstr("gradient_accumulate_loss"), HasSubstr("every rank calls it equally often")));
  EXPECT_NE(errors[1], "no error");
  // Calls of different steps that meet.
  run_ranks(3, [](World& world) {
    const std::string error = error_of<Error>(
        [&] { gradient_accumulate_loss(parameter(1), 1, world.rank == 2 ? 9 : 4, world.group); });
    EXPECT_THAT(error, AllOf(HasSubstr("ConfigError"), HasSubstr("the same global_valid on every rank")));
  });
}

// Three calls of unequal content; the result is that of one.
TEST(DeferredAccumulator, DividesOnceAtTheEnd) {
  run_ranks(2, [](World& world) {
    DeferredAccumulator accumulator(std::make_unique<TokenMean>(), world.group);
    for (int step = 0; step < 2; ++step) {  // the second starts from nothing
      at::Tensor x = parameter(1);
      const auto call = [&](const MicroBatches& batches) {
        for (const Batch& batch : accumulator.begin_call(batches))
          accumulator
              .raw_loss({{"loss", x * static_cast<double>(world.rank + 1) *
                                      static_cast<double>(batch.num_targets())}})
              .backward();
      };
      call({batch_of(3, 1), batch_of(2)});
      call(world.rank == 0 ? MicroBatches{} : MicroBatches{batch_of(7)});
      call({batch_of(1)});
      const auto result = accumulator.finish();
      at::Tensor gradient = x.grad().clone();
      EXPECT_DOUBLE_EQ(gradient.item<double>(), world.rank == 0 ? 6 : 26);  // raw
      world.group.all_reduce(gradient);
      EXPECT_DOUBLE_EQ(result.gradient_scale, 1.0 / 19);
      EXPECT_DOUBLE_EQ(gradient.item<double>() * result.gradient_scale, 32.0 / 19);
      EXPECT_DOUBLE_EQ(result.loss, 32.0 / 19);
      EXPECT_EQ(result.step_counts.targets, 19);
      EXPECT_EQ(result.step_counts.micro_batches, 7);
    }
  });
}

TEST(DeferredAccumulator, OfNothingScalesByZero) {
  Group alone = Group::solo();
  DeferredAccumulator accumulator(std::make_unique<SampleMean>(), alone);
  for (const Batch& batch : accumulator.begin_call({batch_of(0, 3)})) {
    at::Tensor x = parameter(1);
    accumulator.raw_loss({{"loss", x * 3}}).backward();
    accumulator.raw_loss({{"loss", at::zeros({})}}).backward();  // there is nothing to differentiate
    EXPECT_EQ(x.grad().item<double>(), 3) << "raw: what other calls hold is not known";
    EXPECT_EQ(batch.num_tokens(), 3);
  }
  const auto result = accumulator.finish();
  EXPECT_EQ(result.gradient_scale, 0);
  EXPECT_EQ(result.loss, 0);
}

// A term over all tokens together with one over targets: a call without targets counts before and between
// the others.
TEST(DeferredAccumulator, KeepsCallsWithoutTargets) {
  Group alone = Group::solo();
  const MicroBatches all = {batch_of(0, 6, 1), batch_of(4, 0, 2), batch_of(0, 3, 3)};
  for (const bool weighted : {false, true})
    for (const auto& order : {std::array{0, 1, 2}, {1, 2, 0}}) {
      std::unique_ptr<Normalizer> mean = std::make_unique<TokenMean>();
      if (weighted) mean = std::make_unique<WeightedMean>();
      DeferredAccumulator accumulator(std::move(mean), alone);
      at::Tensor x = parameter(1);
      for (const int which : order)
        for (const Batch& batch : accumulator.begin_call({all[static_cast<std::size_t>(which)]}))
          accumulator
              .raw_loss({{"ce", x * static_cast<double>(batch.num_targets())},
                         {"z", x * x * static_cast<double>(batch.num_tokens()), Mean::kStep, 0.5}})
              .backward();
      const auto result = accumulator.finish();
      EXPECT_DOUBLE_EQ(result.loss, (4 + 0.5 * 13) / 4);
      EXPECT_DOUBLE_EQ(x.grad().item<double>() * result.gradient_scale, (4 + 13) / 4.);
    }
}

}  // namespace
}  // namespace isograd
