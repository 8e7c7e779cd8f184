// The one division: the numbers of docs/losses.md by hand, terms, deferred means, and what is logged.
#include "isograd/loss.hpp"

#include <cmath>

#include <torch/csrc/autograd/custom_function.h>

#include "loss/normalizer.hpp"
#include "loss/normalizer_testing.hpp"

// A user's functions, whose names say what the normaliser's own node is called.
namespace isograd_app {
namespace {
struct SharedEmbedding : torch::autograd::Function<SharedEmbedding> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x * 2; }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list upstream) {
    return {upstream[0] * 2};
  }
};
}  // namespace
}  // namespace isograd_app

namespace isograd {
namespace {

using namespace normalizer_testing;
using ::testing::AllOf;
using ::testing::HasSubstr;

at::Tensor loss_sum(const Batch& prepared, Mean mean = Mean::kStep) {
  const at::Tensor valid = prepared.targets.ne(kIgnoreIndex).to(at::kDouble);
  const at::Tensor weights = weights_for(prepared, mean);
  const at::Tensor losses = prepared.targets.to(at::kDouble) * valid;
  return weights.defined() ? (losses * weights).sum() : losses.sum();
}

template <typename MeanType, typename... Arguments>
double loss_of(const std::vector<MicroBatches>& by_rank, Arguments... arguments) {
  double loss = 0;
  run_ranks(static_cast<int>(by_rank.size()), [&](World& world) {
    MeanType mean(arguments...);
    const MicroBatches& own = by_rank[static_cast<std::size_t>(world.rank)];
    const Denominator denominator = mean.denominator(mean.count(own, world.group, false));
    check_agreement(denominator, world.group);
    at::Tensor sum = at::zeros({1}, at::kDouble);
    for (const Batch& batch : own)
      sum += mean.scale({{"loss", loss_sum(mean.prepare(batch, denominator))}}, denominator);
    world.group.all_reduce(sum);
    if (world.rank == 0) loss = sum.item<double>();
  });
  return loss;
}

TEST(MeansByHand, NineHundredAndOneHundred) {
  const std::vector<MicroBatches> batches = {{batch_of({{1, 900, 900, 1}})}, {batch_of({{2, 100, 100, 11}})}};
  EXPECT_DOUBLE_EQ(loss_of<TokenMean>(batches), 2.0);
  EXPECT_DOUBLE_EQ(loss_of<SampleMean>(batches), 6.0);
  EXPECT_DOUBLE_EQ(loss_of<TokenMean>(batches, NormalizerOptions{.replicas = 2}), 6.0);  // declared as such
  EXPECT_DOUBLE_EQ(loss_of<FixedDenominator>(batches, 500.0), 4.0);
  EXPECT_DOUBLE_EQ(loss_of<NoDenominator>(batches), 2000.0);
}

TEST(MeansByHand, TenAndAThousandTokens) {
  const std::vector<MicroBatches> one = {{batch_of({{7, 10, 10, 1}, {8, 1000, 1000, 3}})}};
  EXPECT_DOUBLE_EQ(loss_of<SampleMean>(one), 2.0);
  EXPECT_NEAR(loss_of<TokenMean>(one), 2.980198, 5e-7);
  // The same, the long sample on two ranks and in three micro-batches.
  const std::vector<MicroBatches> cut = {
      {batch_of({{8, 300, 1000, 3}}), batch_of({{7, 10, 10, 1}, {8, 1, 1000, 3}})},
      {batch_of({{8, 699, 1000, 3}})}};
  EXPECT_DOUBLE_EQ(loss_of<SampleMean>(cut), 2.0);
  EXPECT_NEAR(loss_of<TokenMean>(cut), 2.980198, 5e-7);
}

// ℓ = 1..8, cut 5/3 over two context ranks; the same in three fragments on two ranks.
TEST(MeansByHand, EightTokensCutFiveAndThree) {
  const auto piece = [](std::int64_t begin, std::int64_t end) {
    Batch batch = batch_of({{4, end - begin, 8}});
    batch.targets = at::arange(begin + 1, end + 1);
    return batch;
  };
  EXPECT_DOUBLE_EQ(loss_of<SampleMean>({{piece(0, 5)}, {piece(5, 8)}}), 4.5);
  EXPECT_DOUBLE_EQ(loss_of<SampleMean>({{piece(0, 2), piece(2, 5)}, {piece(5, 8)}}), 4.5);
  // Mean of local means, and fragments counted as samples: (3 + 7) / 2, and (1.5 + 4 + 7) / 3 for three.
  const auto as_samples = [](Batch batch, std::int64_t id) {
    batch.sample_ids = {id};
    batch.sample_targets = {batch.num_targets()};
    return batch;
  };
  EXPECT_DOUBLE_EQ(loss_of<SampleMean>({{as_samples(piece(0, 5), 1)}, {as_samples(piece(5, 8), 2)}}), 5.0);
  EXPECT_DOUBLE_EQ(loss_of<SampleMean>({{as_samples(piece(0, 2), 1), as_samples(piece(2, 5), 2)},
                                        {as_samples(piece(5, 8), 3)}}),
                   12.5 / 3);
}

TEST(MeansByHand, Weights) {
  // Σ wℓ / Σ w = (0.5·1 + 2·3) / 2.5; per sample (0.5·1/0.5 + (2·3 + 0·3)/2) / 2.
  const std::vector<MicroBatches> batches = {{batch_of({{1, 1, 1, 1}}, {0.5})},
                                             {batch_of({{2, 2, 2, 3}}, {2, 0})}};
  EXPECT_DOUBLE_EQ(loss_of<WeightedMean>(batches), 2.6);
  EXPECT_DOUBLE_EQ(loss_of<SampleMean>(batches), 2.0);
  EXPECT_DOUBLE_EQ(loss_of<FixedDenominator>(batches, 4.0), 1.625);
  // A rank without weights weighs 1 each. A mask is a weight.
  EXPECT_DOUBLE_EQ(loss_of<WeightedMean>(std::vector<MicroBatches>{{batch_of({{1, 1, 1, 5}})},
                                                                   {batch_of({{2, 2, 2, 3}}, {2, 0})}}),
                   11.0 / 3);
  Batch masked = batch_of({{1, 4, 4, 2}});
  masked.weights = at::tensor({1, 0, 1, 0}).to(at::kBool);
  EXPECT_DOUBLE_EQ(loss_of<WeightedMean>(std::vector<MicroBatches>{{masked}}), 2.0);
}

TEST(SampleMean, DropsSilentSamplesAndSaysHowMany) {
  Group alone = Group::solo();
  SampleMean mean;
  Batch batch = batch_of({{1, 3, 3, 2}, {2, 2, 0, 9}, {3, 1, 1, 4}}, {1, 1, 1, 1, 1, 0});
  batch.targets.narrow(0, 3, 2).fill_(kIgnoreIndex);
  const StepCounts step_counts = mean.count({batch}, alone, false);
  EXPECT_EQ(step_counts.samples, 1);
  EXPECT_EQ(step_counts.silent, 2);  // one without target, one whose weights are 0
  const Denominator denominator = mean.denominator(step_counts);
  EXPECT_EQ(denominator.of, "samples");
  EXPECT_EQ(denominator.value, 1);
  EXPECT_DOUBLE_EQ(loss_sum(mean.prepare(batch, denominator)).item<double>(), 2.0);
}

// A last fragment whose only token ends the document holds no target: the rest of the sample is whole.
TEST(SampleMean, AFragmentWithoutTargetIsNoCut) {
  Batch tail = batch_of({{1, 1, 6}});
  tail.targets.fill_(kIgnoreIndex);
  run_ranks(2, [&](World& world) {
    const StepCounts step_counts =
        SampleMean().count({world.rank == 0 ? batch_of({{1, 6, 6, 5}}) : tail}, world.group, false);
    EXPECT_EQ(step_counts.samples, 1);
    EXPECT_EQ(step_counts.cut, 0);
  });
}

TEST(Replicas, AreMeansOfTheirOwn) {
  // Four ranks, two replicas: means (1·2 + 5·2)/4 = 3 and 9; an empty replica does not count.
  std::vector<MicroBatches> batches = {
      {batch_of({{1, 2, 2, 1}})}, {batch_of({{2, 2, 2, 5}})}, {batch_of({{3, 7, 7, 9}})}, {}};
  EXPECT_DOUBLE_EQ(loss_of<TokenMean>(batches, NormalizerOptions{.replicas = 2}), 6.0);
  batches[2] = {};
  EXPECT_DOUBLE_EQ(loss_of<TokenMean>(batches, NormalizerOptions{.replicas = 2}), 3.0);
}

// Rows of replicas that count nothing are not part of the mean, though they are there: every term is
// (1/R) Σ_r (its sum over replica r) / (its count in r) over the R replicas that count something.
TEST(Replicas, ATermOfAReplicaWithoutCountsIsZero) {
  // Three replicas of two ranks: [targets, tokens without target, weight] of each rank; replica 1 has no
  // target, replica 2 none that weighs anything.
  constexpr int kRanks = 6, kReplicas = 3;
  struct Held {
    std::int64_t targets, silent;
    double weight;
  };
  const Held held[kRanks] = {{5, 2, 0.5}, {0, 3, 1}, {0, 1000, 1}, {0, 0, 1}, {3, 1, 0}, {2, 0, 0}};
  struct Case {
    std::string name;
    Mean mean;
  };
  const std::vector<Case> terms = {{"step", Mean::kStep},
                                   {"targets", Mean::kTargets},
                                   {"samples", Mean::kSamples},
                                   {"weights", Mean::kWeights},
                                   {"tokens", Mean::kTokens}};
  // The sum of each term is x times the rank's tokens, with target or without.
  const auto tokens = [&](int rank) { return static_cast<double>(held[rank].targets + held[rank].silent); };
  const auto counted = [&](int rank, Mean mean) {  // plainly
    const Held& own = held[rank];
    if (mean == Mean::kWeights || mean == Mean::kStep) return own.weight * static_cast<double>(own.targets);
    if (mean == Mean::kSamples) return own.targets > 0 && own.weight > 0 ? 1. : 0.;
    return static_cast<double>(own.targets);
  };
  std::vector<double> wanted(terms.size());
  for (std::size_t t = 0; t < terms.size(); ++t) {
    double counting = 0, all = 0;
    for (int replica = 0; replica < kReplicas; ++replica) {
      const int a = 2 * replica, b = a + 1;
      const double n = counted(a, terms[t].mean) + counted(b, terms[t].mean);
      all += tokens(a) + tokens(b);
      if (n == 0) continue;
      ++counting;
      wanted[t] += (tokens(a) + tokens(b)) / n;
    }
    wanted[t] = terms[t].mean == Mean::kTokens ? all / all : wanted[t] / counting;
  }
  run_ranks(kRanks, [&](World& world) {
    const Held& own = held[world.rank];
    std::vector<double> weights(static_cast<std::size_t>(own.targets + own.silent), own.weight);
    Batch batch = batch_of({{10 + world.rank, own.targets + own.silent, own.targets}}, weights);
    if (weights.empty()) batch = empty_batch();
    batch.targets.narrow(0, own.targets, own.silent).fill_(kIgnoreIndex);
    WeightedMean mean({.replicas = kReplicas, .count_samples = true});
    const StepCounts step_counts = mean.count({batch}, world.group, false);
    const Denominator denominator = mean.denominator(step_counts);
    EXPECT_NE(denominator.value, 0) << "the step is not empty";
    check_agreement(denominator, world.group);
    for (std::size_t t = 0; t < terms.size(); ++t) {
      at::Tensor x = at::ones({}, at::kDouble).requires_grad_(true);
      const LossTerms one = {{terms[t].name, x * tokens(world.rank), terms[t].mean}};
      const at::Tensor share = mean.scale(one, denominator);
      share.backward();
      TermSums logged;
      Readings readings;
      logged.add(one, share, denominator, step_counts, readings);
      const at::Tensor gradient = x.grad().defined() ? x.grad() : at::zeros({}, at::kDouble);
      const at::Tensor sums =
          at::stack({share.detach(), gradient, at::scalar_tensor(logged.terms()[0].value, at::kDouble)});
      world.group.all_reduce(sums);
      EXPECT_NEAR(sums[2].item<double>(), wanted[t], 1e-12 * wanted[t]) << "logged, " << terms[t].name;
      EXPECT_NEAR(sums[0].item<double>(), wanted[t], 1e-12 * wanted[t]) << terms[t].name;
      EXPECT_NEAR(sums[1].item<double>(), wanted[t], 1e-12 * wanted[t]) << terms[t].name;
    }
    // A NaN of a replica that counts nothing reaches neither loss nor gradient.
    if (world.rank / 2 != 0) {
      at::Tensor x = at::ones({2}, at::kDouble).requires_grad_(true);
      const at::Tensor share = mean.scale({{"ce", (x * std::nan("")).sum()}}, denominator);
      share.backward();
      EXPECT_EQ(share.item<double>(), 0);
      EXPECT_TRUE(!x.grad().defined() || x.grad().eq(0).all().item<bool>());
    }
  });
}

// ---- scaling ----

TEST(Scale, GivesEachTermItsOwnDenominator) {
  Group alone = Group::solo();
  TokenMean mean({.count_samples = true});
  const Batch batch = batch_of({{1, 3, 3, 2}, {2, 1, 1, 6}});
  const Denominator denominator =
      mean.denominator(mean.count({batch, batch_of({{9, 4, 4, 1}})}, alone, false));
  EXPECT_EQ(denominator.targets, 8);
  EXPECT_EQ(denominator.samples, 3);
  EXPECT_EQ(denominator.micro_batches, 2);
  const Batch prepared = mean.prepare(batch, denominator);
  EXPECT_FALSE(weights_for(prepared, Mean::kStep).defined());
  EXPECT_DOUBLE_EQ(loss_sum(prepared, Mean::kSamples).item<double>(), 8.0);
  at::Tensor x = at::ones({5}, at::kDouble).requires_grad_(true);
  const auto at_x = [&](int i) { return x[i].reshape({}); };
  const at::Tensor share = mean.scale({{"a", at_x(0)},
                                       {"b", at_x(1), Mean::kSamples, 2.0},
                                       {"c", at_x(2), Mean::kMicroBatches},
                                       {"d", at_x(3), Mean::kFixed, 0.5, 10.0},
                                       {"e", at_x(4), Mean::kNone}},
                                      denominator);
  EXPECT_DOUBLE_EQ(share.item<double>(), 1.0 / 8 + 2.0 / 3 + 0.5 + 0.05 + 1);
  share.backward();
  const double wanted[] = {1.0 / 8, 2.0 / 3, 0.5, 0.05, 1};
  for (int i = 0; i < 5; ++i) EXPECT_DOUBLE_EQ(x.grad()[i].item<double>(), wanted[i]);
}

TEST(Scale, RefusesToDivideTwice) {
  TokenMean mean;
  at::Tensor x = at::ones({}, at::kDouble).requires_grad_(true);
  const Denominator denominator{.value = 4};
  const at::Tensor share = mean.scale({{"a", x * 2}}, denominator);
  for (const at::Tensor& twice : {share, share * 3, (share + 1).to(at::kFloat)})
    EXPECT_THAT(error_of([&] {
                  mean.scale({{"again", twice}}, denominator);
                }),
                AllOf(HasSubstr("'again'"), HasSubstr("divided already")));
  EXPECT_EQ(error_of([&] { mean.scale({{"a", x * 2}}, denominator); }), "no error");
  // On whichever way down and however far.
  at::Tensor far = share;
  for (int i = 0; i < 10000; ++i) far = far + 1;
  for (const at::Tensor& twice : {x * 2 + share, (x * 2 + x) * (x + share), at::stack({x, share}).sum(), far})
    EXPECT_THAT(error_of([&] {
                  mean.scale({{"again", twice}}, denominator);
                }),
                AllOf(HasSubstr("'again'"), HasSubstr("divided already")));
  EXPECT_EQ(error_of([&] {
              mean.scale({{"a", isograd_app::SharedEmbedding::apply(x)}}, denominator);
            }),
            "no error");
  EXPECT_THAT(error_of([&] {
                mean.scale({{"a", x, Mean::kSamples}}, {.value = 4, .targets = 4});
              }),
              HasSubstr("count_samples"));
  EXPECT_THAT(error_of([&] {
                mean.scale({{"a", x, Mean::kFixed, 1.0, 0.0}}, denominator);
              }),
              HasSubstr("denominator 0"));
}

// 1/N in bf16 is off by up to 2^-9 (0.14 % for 1015 targets), and so is then the whole gradient.
TEST(Scale, RefusesToRoundTheDivisionTo16Bits) {
  TokenMean mean;
  const Denominator denominator{.value = 1015, .targets = 1015};
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    at::Tensor x = at::ones({4, 3}, type).requires_grad_(true);
    const at::Tensor each = (x * 2).sum(1);  // a loss of each token
    const std::vector<at::Tensor> narrow = {
        each.sum(),
        each.sum() * 3,
        each.sum().to(at::kFloat),
        each.sum().to(at::kDouble) + at::ones({}, at::kDouble),
        each.sum(at::kFloat),
        each.to(at::kFloat).sum(),
        each.to(at::kFloat).sum().to(at::kDouble) * 2,
        (each.to(at::kFloat) * at::ones({4})).sum(),
        (each * at::ones({4})).sum(),
        (each.to(at::kFloat) / 2).mean(),
        at::masked_select(each.to(at::kFloat), at::ones({4}, at::kBool)).sum(),
        each.to(at::kFloat).index({at::ones({4}, at::kBool)}).sum(),
        each.to(at::kFloat).masked_fill(at::zeros({4}, at::kBool), 0).sum(),
        at::where(at::ones({4}, at::kBool), each.to(at::kFloat), 0).sum(),
        each.to(at::kFloat).view({2, 2}).sum(1).sum(),
        -(-each.to(at::kFloat)).sum(),
        at::cat({each.to(at::kFloat), at::ones({2})}).slice(0, 1).sum(),
        at::stack({each[0], each[1]}).to(at::kFloat).sum()};
    for (std::size_t i = 0; i < narrow.size(); ++i)
      EXPECT_THAT(error_of([&] {
                    mean.scale({{"low", narrow[i]}}, denominator);
                  }),
                  AllOf(HasSubstr("'low'"), HasSubstr("begins in 16 bits")))
          << i;
    EXPECT_EQ(error_of([&] {
                mean.scale({{"low", each.sum(), Mean::kStep, 0.0}}, denominator);
              }),
              "no error")
        << "of weight 0: nothing flows back";
    // In single precision the division is right before anything is rounded, to one unit of bf16 or fp16.
    const at::Tensor wide = (x.to(at::kFloat) * 2).square().sum();
    mean.scale({{"wide", wide}}, denominator).backward();
    const at::Tensor exact = at::full({4, 3}, 8.0 / 1015);
    EXPECT_LE(((x.grad().to(at::kFloat) - exact) / exact).abs().max().item<double>(), 0x1p-9);
    // The usual masked sum of losses that single precision makes, whatever type the model has.
    const at::Tensor logits = x * 3, mask = at::ones({4});
    const auto of_tokens = [&](const at::Tensor& log_probabilities) {
      return (-log_probabilities.gather(1, at::zeros({4, 1}, at::kLong)).squeeze(1) * mask).sum();
    };
    EXPECT_EQ(error_of([&] {
                mean.scale({{"wide", of_tokens(at::log_softmax(logits.to(at::kFloat), 1))}}, denominator);
              }),
              "no error");
    EXPECT_THAT(error_of([&] {
                  mean.scale({{"low", of_tokens(at::log_softmax(logits, 1).to(at::kFloat))}}, denominator);
                }),
                HasSubstr("begins in 16 bits"));
  }
  // A parameter in bf16 by itself keeps its own type.
  at::Tensor gain = at::ones({}, at::kBFloat16).requires_grad_(true);
  EXPECT_EQ(error_of([&] { mean.scale({{"gain", gain.to(at::kFloat) * 2}}, denominator); }), "no error");
}

}  // namespace
}  // namespace isograd
