// A vocabulary cut over ranks: every loss, its gradients and the embedding against one process's, by
// LibTorch's own log_softmax.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "base/error_testing.hpp"
#include "isograd/batch.hpp"
#include "isograd/tensor_parallel.hpp"
#include "isograd/world.hpp"

namespace isograd {
namespace {

using ::testing::HasSubstr;

constexpr std::int64_t kPositions = 23, kHidden = 6, kVocabulary = 257;

struct Projection {
  at::Tensor hidden, weight, bias, targets, weights;

  explicit Projection(at::ScalarType type = at::kDouble) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(5);
    const auto draw = [&](at::IntArrayRef shape) {
      return at::randn(shape, generator, at::TensorOptions(at::kDouble)).to(type).requires_grad_();
    };
    hidden = draw({kPositions, kHidden}), weight = draw({kVocabulary, kHidden}), bias = draw({kVocabulary});
    targets = at::arange(kPositions) * 37 % kVocabulary;
    targets[4] = kIgnoreIndex;
    weights = at::arange(kPositions, at::kDouble).sin().abs();
    weights[7] = 0;
  }
};

struct Coefficients {
  double smoothing = 0, z = 0;
};

// Σ_i w_i ℓ_i, from its formula.
at::Tensor formula(const Projection& p, const Coefficients& of, const at::Tensor& weights) {
  const at::Tensor logits = at::linear(p.hidden, p.weight, p.bias).to(at::kDouble);
  const at::Tensor log_p = at::log_softmax(logits, 1), valid = p.targets.ne(kIgnoreIndex).to(at::kDouble);
  const at::Tensor likelihood = log_p.gather(1, p.targets.clamp_min(0).unsqueeze(1)).squeeze(1);
  const at::Tensor each = -(1 - of.smoothing) * likelihood - of.smoothing * log_p.mean(1) +
                          of.z * at::logsumexp(logits, {1}).square();
  return (each * valid * weights).sum();
}

double error_of(const at::Tensor& found, const at::Tensor& wanted) {
  return ((found.to(at::kDouble) - wanted.to(at::kDouble)).norm() / wanted.to(at::kDouble).norm())
      .item<double>();
}

struct Cutting {
  Layout layout;
  VocabularyShard shard;
  at::Tensor hidden, weight, bias;  // leaves: hidden whole, the others this rank's
};

Cutting cut_over(World& world, const Projection& p, bool last_has_none = false) {
  const Mesh mesh(world, Grid({{"tp", world.size}}));
  Cut rows = even_cut(mesh.grid(), "tp", 0, {kVocabulary});
  if (last_has_none && world.size > 1) rows.rows[0][0] += std::exchange(rows.rows[0].back(), 0);
  Layout layout(mesh, {{"weight", placed(mesh.grid(), {kVocabulary, kHidden}, {rows})},
                       {"bias", placed(mesh.grid(), {kVocabulary}, {rows})}});
  const auto own = [&](const std::string& name, const at::Tensor& whole) {
    return layout.local(name, whole.detach()).requires_grad_();
  };
  const VocabularyShard shard = vocabulary_shard(layout, "weight");
  return {layout, shard, p.hidden.detach().clone().requires_grad_(), own("weight", p.weight),
          own("bias", p.bias)};
}

class Vocabulary : public ::testing::TestWithParam<std::tuple<int, bool, bool>> {};
INSTANTIATE_TEST_SUITE_P(RanksFusedEmpty, Vocabulary,
                         ::testing::Combine(::testing::Values(1, 2, 3, 5, 8), ::testing::Bool(),
                                            ::testing::Bool()));

TEST_P(Vocabulary, LossesAndGradientsAreOneProcesss) {
  const auto [ranks, fused, last_has_none] = GetParam();
  for (const Coefficients of : {Coefficients{}, {.smoothing = 0.1}, {.smoothing = 0.2, .z = 1e-2}})
    for (const bool weighted : {false, true}) {
      Projection whole;
      const at::Tensor weights = weighted ? whole.weights : at::ones({kPositions}, at::kDouble);
      const at::Tensor wanted = formula(whole, of, weights);
      wanted.backward();
      run_ranks(ranks, [&](World& world) {
        Cutting own = cut_over(world, whole, last_has_none);
        const at::Tensor hidden = copy_to_tp(own.shard.group, own.hidden);
        at::Tensor sum;
        if (fused)
          sum = linear_cross_entropy_sum(hidden, own.weight, whole.targets,
                                         {.weights = weights,
                                          .label_smoothing = of.smoothing,
                                          .z_loss = of.z,
                                          .bias = own.bias,
                                          .shard = own.shard,
                                          .tile_tokens = 5,
                                          .tile_vocabulary = 40});
        else
          sum = cross_entropy_sum(
              at::linear(hidden, own.weight, own.bias), whole.targets,
              {.weights = weights, .label_smoothing = of.smoothing, .z_loss = of.z, .shard = own.shard});
        EXPECT_NEAR(sum.item<double>(), wanted.item<double>(), 1e-11 * wanted.item<double>());
        sum.backward();
        EXPECT_LT(error_of(own.hidden.grad(), whole.hidden.grad()), 1e-12);
        EXPECT_LT(error_of(own.layout.whole("weight", own.weight.grad()), whole.weight.grad()), 1e-12);
        EXPECT_LT(error_of(own.layout.whole("bias", own.bias.grad()), whole.bias.grad()), 1e-12);
      });
    }
}

// Without the other ranks' columns each rank normalises over its own: what the exchange is there for.
TEST(VocabularyPlanted, ASoftmaxOverOnesOwnColumnsIsAnotherLoss) {
  const Projection whole;
  const double wanted = formula(whole, {}, at::ones({kPositions}, at::kDouble)).item<double>();
  run_ranks(2, [&](World& world) {
    Cutting own = cut_over(world, whole);
    own.shard.group = Group::solo();
    const at::Tensor logits = at::linear(own.hidden, own.weight, own.bias);
    EXPECT_GT(
        std::abs(cross_entropy_sum(logits, whole.targets, {.shard = own.shard}).item<double>() - wanted),
        0.1 * wanted);
  });
}

TEST(Vocabulary, LogProbabilitiesAndZLossHaveTheSameBitsOnAllRanks) {
  Projection whole(at::kFloat);
  const at::Tensor log_p =
      at::log_softmax(at::linear(whole.hidden, whole.weight, whole.bias).to(at::kDouble), 1)
          .gather(1, whole.targets.clamp_min(0).unsqueeze(1))
          .squeeze(1);
  for (const int ranks : {2, 3, 5})
    run_ranks(ranks, [&](World& world) {
      Cutting own = cut_over(world, whole);
      const at::Tensor logits = at::linear(own.hidden, own.weight, own.bias);
      const at::Tensor found = token_log_probabilities(logits, whole.targets, own.shard);
      const at::Tensor z = z_loss_sum(logits, whole.targets, {}, own.shard);
      EXPECT_EQ(found[4].item<float>(), 0);
      // log-sums of 257 fp32 logits of size up to 10: some roundings of 2^-24 of the largest logit each
      EXPECT_LT((found.to(at::kDouble) - at::where(whole.targets.eq(kIgnoreIndex), 0.0, log_p))
                    .abs()
                    .max()
                    .item<double>(),
                64 * 0x1p-24);
      for (const at::Tensor& value : {found, z.unsqueeze(0)}) {
        const at::Tensor all = own.shard.group.all_gather(value.detach());
        for (int rank = 1; rank < world.size; ++rank) EXPECT_TRUE(all[rank].equal(all[0]));
      }
    });
}

TEST(Vocabulary, WhatIsNotFiniteOnOneRankShowsOnAll) {
  run_ranks(3, [](World& world) {
    Projection whole;
    Cutting own = cut_over(world, whole);
    at::Tensor logits = at::linear(whole.hidden, own.weight, own.bias).detach();
    const at::Tensor masked = logits.clone();
    if (world.rank == 1) masked.fill_(-INFINITY);  // a masked part of the vocabulary is no NaN
    const at::Tensor targets = at::zeros({kPositions}, at::kLong);
    EXPECT_TRUE(std::isfinite(cross_entropy_sum(masked, targets, {.shard = own.shard}).item<double>()));
    if (world.rank == 1) logits[3][2] = NAN;
    EXPECT_TRUE(std::isnan(cross_entropy_sum(logits, targets, {.shard = own.shard}).item<double>()));
  });
}

TEST(Vocabulary, RefusesAShardOutsideItsVocabulary) {
  const Projection whole;
  EXPECT_THAT(error_testing::error_of([&] {
                cross_entropy_sum(at::linear(whole.hidden, whole.weight), whole.targets,
                                  {.shard = {.first = 3, .vocabulary = kVocabulary}});
              }),
              HasSubstr("257 columns from 3 on of a vocabulary of 257"));
}

TEST(Vocabulary, EmbeddingsAreWhole) {
  const Projection whole;
  const at::Tensor tokens = at::arange(kPositions) * 53 % kVocabulary,
                   factor = at::arange(kPositions, at::kDouble).cos();
  const std::int64_t pad = tokens[5].item<std::int64_t>();
  const at::Tensor weight = whole.weight.detach().clone().requires_grad_();
  const at::Tensor wanted = at::embedding(weight, tokens, pad);
  (wanted * factor.unsqueeze(1)).sum().backward();
  for (const int ranks : {1, 2, 3, 8})
    for (const bool last_has_none : {false, true})
      run_ranks(ranks, [&](World& world) {
        Cutting own = cut_over(world, whole, last_has_none);
        const at::Tensor found =
            reduce_from_tp(own.shard.group, embedding_part(own.weight, tokens, own.shard, pad));
        EXPECT_TRUE(found.detach().equal(wanted.detach()));
        (found * factor.unsqueeze(1)).sum().backward();
        EXPECT_TRUE(own.layout.whole("weight", own.weight.grad()).equal(weight.grad()));
      });
}

}  // namespace
}  // namespace isograd
