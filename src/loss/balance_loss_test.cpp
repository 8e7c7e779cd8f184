// A loss that does not decompose, in both scopes, against plain code over the whole batch.
#include "isograd/loss.hpp"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "base/error_testing.hpp"
#include "isograd/error.hpp"
#include "isograd/world.hpp"

namespace isograd {
namespace {

using ::testing::HasSubstr;

constexpr std::int64_t kExperts = 5, kWidth = 4;

at::Tensor features(int rank, int round) {  // uneven; rank 1 has no tokens in round 1
  auto generator =
      at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(100 + 10 * rank + round));
  const std::int64_t tokens = rank == 1 && round == 1 ? 0 : 3 + (5 * rank + 2 * round) % 7;
  return at::randn({tokens, kWidth}, generator, at::TensorOptions(at::kDouble));
}

at::Tensor router() {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
  return at::randn({kExperts, kWidth}, generator, at::TensorOptions(at::kDouble)).requires_grad_(true);
}

struct Routed {
  at::Tensor probabilities, chosen;
};
Routed route(const at::Tensor& x, const at::Tensor& weight) {
  const at::Tensor p = at::softmax(at::linear(x, weight), 1);
  return {p, std::get<1>(p.topk(2, 1))};
}

// E Σ_e f_e P_e over these tokens, plainly.
at::Tensor plain(const std::vector<at::Tensor>& tokens, const at::Tensor& weight) {
  const Routed routed = route(at::cat(tokens), weight);
  const at::Tensor places = at::one_hot(routed.chosen, kExperts).to(at::kDouble).sum(1);  // [T, E]
  return kExperts * (places.mean(0) / 2 * routed.probabilities.mean(0)).sum();
}

class BalanceAt : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, BalanceAt, ::testing::Values(1, 2, 3, 5));

TEST_P(BalanceAt, IsTheLossOfTheWholeBatchInBothScopes) {
  const int ranks = GetParam(), rounds = 3;
  for (const Scope scope : {Scope::kMicroBatch, Scope::kStep}) {
    const at::Tensor weight = router();
    std::vector<std::vector<at::Tensor>> by_round(rounds);
    std::vector<at::Tensor> all;
    for (int round = 0; round < rounds; ++round)
      for (int rank = 0; rank < ranks; ++rank) {
        by_round[static_cast<std::size_t>(round)].push_back(features(rank, round));
        all.push_back(features(rank, round));
      }
    at::Tensor wanted = plain(all, weight);
    if (scope == Scope::kMicroBatch) {
      wanted = at::zeros({}, at::kDouble);
      for (const auto& tokens : by_round) wanted = wanted + plain(tokens, weight) / rounds;
    }
    const at::Tensor gradient = torch::autograd::grad({wanted}, {weight})[0];
    // The other scope is another loss.
    EXPECT_GT(std::abs(plain(all, weight).item<double>() - plain(by_round[0], weight).item<double>()), 1e-3);

    run_ranks(ranks, [&](World& world) {
      const at::Tensor own = router();
      NoDenominator mean;
      const MicroBatches batches(rounds, empty_batch());
      const Denominator denominator = mean.denominator(mean.count(batches, world.group, false));
      BalanceLoss balance({.experts = kExperts, .weight = 0.25, .scope = scope}, world.group);
      for (int step = 0; step < 2; ++step) {
        own.mutable_grad() = at::Tensor();
        if (scope == Scope::kStep) {
          for (int round = 0; round < rounds; ++round)
            balance.collect(route(features(world.rank, round), own).chosen);
          balance.finish_collecting();
        }
        at::Tensor value = at::zeros({}, at::kDouble);
        for (int round = 0; round < rounds; ++round) {
          const Routed routed = route(features(world.rank, round), own);
          const at::Tensor share =
              mean.scale({balance.term(routed.probabilities, routed.chosen)}, denominator);
          if (share.requires_grad()) share.backward();
          value += share.detach();
        }
        at::Tensor sum = own.grad().clone();
        world.group.all_reduce(sum);
        world.group.all_reduce(value);
        EXPECT_NEAR(value.item<double>(), 0.25 * wanted.item<double>(), 1e-13);
        EXPECT_LT((sum - 0.25 * gradient).norm().item<double>(), 1e-12 * gradient.norm().item<double>());
      }
    });
  }
}

// The same twelve micro-batches on any number of ranks: one loss. The other scope is another loss on each.
TEST(Balance, ByDefaultDoesNotDependOnTheLayout) {
  constexpr int kAll = 12;
  const auto tokens_of = [](int i) { return features(i, 0).slice(0, 0, 3 + i % 4); };
  std::vector<at::Tensor> all;
  for (int i = 0; i < kAll; ++i) all.push_back(tokens_of(i));
  const at::Tensor weight = router();
  const at::Tensor wanted = torch::autograd::grad({plain(all, weight)}, {weight})[0];
  const auto error_on = [&](int ranks, const BalanceLossOptions& options) {
    double error = 0;
    run_ranks(ranks, [&](World& world) {
      const at::Tensor own = router();
      BalanceLoss balance(options, world.group);
      NoDenominator mean;
      const MicroBatches batches(static_cast<std::size_t>(kAll / ranks),
                                 batch_of_samples({}, at::zeros({1}, at::kLong), {1}));
      const Denominator denominator = mean.denominator(mean.count(batches, world.group, false));
      if (options.scope == Scope::kStep) {
        for (int i = world.rank; i < kAll; i += ranks) balance.collect(route(tokens_of(i), own).chosen);
        balance.finish_collecting();
      }
      for (int i = world.rank; i < kAll; i += ranks) {
        const Routed routed = route(tokens_of(i), own);
        mean.scale({balance.term(routed.probabilities, routed.chosen)}, denominator).backward();
      }
      at::Tensor sum = own.grad().clone();
      world.group.all_reduce(sum);
      if (world.rank == 0) error = (sum - wanted).norm().item<double>() / wanted.norm().item<double>();
    });
    return error;
  };
  for (const int ranks : {1, 2, 3, 4, 6}) {
    EXPECT_LT(error_on(ranks, {.experts = kExperts}), 1e-13) << ranks;
    EXPECT_GT(error_on(ranks, {.experts = kExperts, .scope = Scope::kMicroBatch}), 0.01) << ranks;
  }
}

// Three layers of which each routes in its own way: the mean of their losses, or one over all their tokens.
TEST(Balance, OfSeveralLayersIsTheirMeanOrOneLoss) {
  constexpr int kLayers = 3, kRounds = 2;
  const auto tokens_of = [](int layer, int rank, int round) {
    return features(rank, round) * (1 + layer) + layer;
  };
  for (const bool pooled : {false, true})
    for (const int ranks : {1, 2, 3}) {
      const at::Tensor weight = router();
      at::Tensor wanted = at::zeros({}, at::kDouble);
      std::vector<at::Tensor> all;
      for (int layer = 0; layer < kLayers; ++layer) {
        std::vector<at::Tensor> own;
        for (int rank = 0; rank < ranks; ++rank)
          for (int round = 0; round < kRounds; ++round) own.push_back(tokens_of(layer, rank, round));
        wanted = wanted + plain(own, weight) / kLayers;
        all.insert(all.end(), own.begin(), own.end());
      }
      const at::Tensor other = plain(all, weight);
      EXPECT_GT(std::abs((wanted - other).item<double>()), 1e-3);  // they are two losses
      if (pooled) wanted = other;
      const at::Tensor gradient = torch::autograd::grad({wanted}, {weight})[0];
      run_ranks(ranks, [&](World& world) {
        const at::Tensor own = router();
        BalanceLoss balance({.experts = kExperts, .layers = kLayers, .pooled = pooled}, world.group);
        const auto routed = [&](int round) {
          std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>> all_layers;
          for (int layer = 0; layer < kLayers; ++layer) {
            const Routed one = route(tokens_of(layer, world.rank, round), own);
            all_layers.first.push_back(one.probabilities);
            all_layers.second.push_back(one.chosen);
          }
          return all_layers;
        };
        for (int round = 0; round < kRounds; ++round) balance.collect(routed(round).second);
        balance.finish_collecting();
        at::Tensor value = at::zeros({1}, at::kDouble);
        for (int round = 0; round < kRounds; ++round) {
          const auto [probabilities, chosen] = routed(round);
          const LossTerm term = balance.term(probabilities, chosen);
          value += term.sum.detach();
          if (term.sum.requires_grad()) term.sum.backward();
        }
        world.group.all_reduce(value);
        at::Tensor sum = own.grad().clone();
        world.group.all_reduce(sum);
        EXPECT_NEAR(value.item<double>(), wanted.item<double>(), 1e-13);
        EXPECT_LT((sum - gradient).norm().item<double>(), 1e-13 * gradient.norm().item<double>());
      });
    }
}

// f_e of the rank's own tokens only, a mistake of real trainers, is another loss.
TEST(Balance, WithItsOwnRanksFractionsIsSeen) {
  run_ranks(3, [](World& world) {
    const at::Tensor weight = router();
    Group alone = Group::solo();
    BalanceLoss local({.experts = kExperts, .scope = Scope::kMicroBatch}, alone);
    const Routed routed = route(features(world.rank, 0), weight);
    at::Tensor value = local.term(routed.probabilities, routed.chosen).sum.detach() / 3;
    world.group.all_reduce(value);
    const at::Tensor wanted = plain({features(0, 0), features(1, 0), features(2, 0)}, weight);
    EXPECT_GT(std::abs(value.item<double>() - wanted.item<double>()), 1e-4);
  });
}

TEST(Balance, RefusesWhatDoesNotFit) {
  Group alone = Group::solo();
  using error_testing::error_of;
  EXPECT_THAT(error_of([&] { BalanceLoss({}, alone); }), HasSubstr("0 experts"));
  EXPECT_THAT(error_of([&] { BalanceLoss({.experts = 3, .layers = 0}, alone); }), HasSubstr("0 layers"));
  BalanceLoss step({.experts = 3}, alone), batch({.experts = 3, .scope = Scope::kMicroBatch}, alone);
  const at::Tensor p = at::full({2, 3}, 1.0 / 3), chosen = at::zeros({2, 1}, at::kLong);
  EXPECT_THAT(error_of([&] { step.term(p, chosen); }), HasSubstr("before the routing of the step is known"));
  EXPECT_THAT(error_of([&] { batch.collect(chosen); }), HasSubstr("scope micro-batch"));
  EXPECT_THAT(error_of([&] { batch.term({p, p}, {chosen, chosen}); }), HasSubstr("of 2 layers"));
  EXPECT_THAT(error_of([&] { batch.term(at::ones({2, 4}), chosen); }), HasSubstr("[2, 4]"));
  EXPECT_THAT(error_of([&] { batch.term(p, chosen + 3); }), HasSubstr("from 0 to 2"));
  // A step's routing is not the next step's.
  step.collect(chosen);
  step.finish_collecting();
  EXPECT_EQ(error_of([&] { step.term(p, chosen); }), "no error");
  EXPECT_THAT(error_of([&] { step.term(p, chosen); }), HasSubstr("more tokens than were collected"));
  step.collect(chosen);
  step.finish_collecting();
  EXPECT_EQ(error_of([&] { step.term(p, chosen); }), "no error");
  EXPECT_EQ(batch.term(at::ones({0, 3}), at::zeros({0, 1}, at::kLong)).sum.item<double>(), 0);
}

}  // namespace
}  // namespace isograd
