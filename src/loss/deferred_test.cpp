// Deferred means, and what a step logs.
#include <cmath>

#include "isograd/loss.hpp"
#include "loss/normalizer.hpp"
#include "loss/normalizer_testing.hpp"

namespace isograd {
namespace {

using namespace normalizer_testing;
using ::testing::AllOf;
using ::testing::HasSubstr;

// A term that is only watched is logged as it is, and stops nothing.
TEST(TermSums, KeepsAValueThatIsNoNumberOutOfTheLoss) {
  StepCounts step_counts;
  step_counts.micro_batches_by_rank = {1, 1};
  const Denominator denominator{.value = 2};
  const double nan = std::nan("");
  for (const int rank : {0, 1}) {
    step_counts.rank = rank;
    TermSums sums;
    Readings readings;
    sums.add({{"cross_entropy", at::full({}, 3.0)},
              {"watched", at::full({}, nan), Mean::kNone, 0.0},
              {"watched_whole", at::full({}, nan), Mean::kNone, 0.0, 1, /*replicated=*/true}},
             at::scalar_tensor(1.5, at::kDouble), denominator, step_counts, readings);
    EXPECT_EQ(sums.loss(), 1.5) << rank;
    EXPECT_TRUE(std::isnan(sums.terms().at(1).value));
  }
}

// ---- deferred ----

TEST(Deferred, RefusesWhatCannotShareABuffer) {
  Group alone = Group::solo();
  Deferred mean(std::make_unique<SampleMean>());
  const auto count = [&](const Batch& batch) { return error_of([&] { mean.count({batch}, alone, false); }); };
  EXPECT_EQ(count(batch_of({{1, 3, 3}})), "no error");
  EXPECT_THAT(count(batch_of({{1, 2, 2}})), HasSubstr("a sample of an earlier call of the same step"));
  EXPECT_THAT(count(batch_of({{2, 2, 5}})), HasSubstr("in another step or call"));
  mean.begin_step();
  const StepCounts step_counts = mean.count({batch_of({{1, 2, 2}})}, alone, false);
  const Denominator denominator = mean.denominator(step_counts);
  EXPECT_THAT(error_of([&] {
                mean.scale({{"a", at::ones({})}, {"z", at::ones({}), Mean::kTargets}}, denominator);
              }),
              AllOf(HasSubstr("'z'"), HasSubstr("one denominator for each deferred gradient buffer")));
  // Another fixed number than the step's is another denominator.
  Deferred fixed(std::make_unique<FixedDenominator>(8.));
  EXPECT_THAT(error_of([&] {
                fixed.scale({{"mse", at::ones({}), Mean::kFixed, 1.0, 4096}}, {.value = 1});
              }),
              AllOf(HasSubstr("'mse'"), HasSubstr("one denominator for each deferred gradient buffer")));
  // Numbers collected over a step that is not known yet.
  BalanceLoss balance({.experts = 3}, alone);
  const at::Tensor chosen = at::zeros({2, 1}, at::kLong);
  balance.collect(chosen);
  balance.finish_collecting();
  const LossTerm term = balance.term(at::full({2, 3}, 1.0 / 3), chosen);
  EXPECT_THAT(error_of([&] { Deferred(std::make_unique<NoDenominator>()).scale({term}, {.value = 1}); }),
              AllOf(HasSubstr("'balance'"), HasSubstr("collected over the whole step")));
  EXPECT_EQ(error_of([&] { NoDenominator().scale({term}, {.value = 1}); }), "no error");
  EXPECT_THAT(error_of([] { Deferred(std::make_unique<TokenMean>(NormalizerOptions{.replicas = 2})); }),
              HasSubstr("per-replica"));
  EXPECT_THAT(error_of([] { Deferred(nullptr); }), HasSubstr("no mean"));
}

// A term that names the step's own mean is divided once, in the log too.
TEST(Deferred, LogsATermOfItsOwnMeanAsAnyOther) {
  Group alone = Group::solo();
  for (const Mean own : {Mean::kTargets, Mean::kWeights, Mean::kSamples}) {
    std::unique_ptr<Normalizer> of = std::make_unique<TokenMean>();
    if (own == Mean::kWeights) of = std::make_unique<WeightedMean>();
    if (own == Mean::kSamples) of = std::make_unique<SampleMean>();
    Deferred mean(std::move(of));
    const StepCounts step_counts = mean.count({batch_of({{1, 3, 3}, {2, 5, 5}})}, alone, false);
    const Denominator denominator = mean.denominator(step_counts);
    const LossTerms terms = {{"step", at::full({}, 6.0)}, {"own", at::full({}, 6.0), own}};
    TermSums sums;
    Readings readings;
    sums.add(terms, mean.scale(terms, denominator), denominator, step_counts, readings);
    for (const TermValue& term : sums.terms())
      EXPECT_EQ(term.value * denominator.gradient_scale, own == Mean::kSamples ? 3 : 0.75) << term.name;
  }
}

TEST(Deferred, KnowsTheRoundsOfACallBesideThoseOfTheStep) {
  run_ranks(3, [](World& world) {
    Deferred mean(std::make_unique<TokenMean>());
    for (int call = 1; call <= 3; ++call) {
      const MicroBatches own(static_cast<std::size_t>(world.rank == call - 1 ? 2 : 1),
                             batch_of({{call, 2, 2}}));
      const StepCounts step_counts = mean.count(own, world.group, false);
      EXPECT_EQ(step_counts.call_micro_batches, 2);
      EXPECT_EQ(step_counts.global_micro_batches, 2 * call);
      EXPECT_EQ(step_counts.targets, 8 * call);
    }
    // An evaluation's denominator knows nothing of the step that is under way, and leaves it alone.
    EXPECT_EQ(mean.undeferred().count({batch_of({{9, 5, 5}})}, world.group, false).targets, 15);
    EXPECT_EQ(mean.count({}, world.group, false).targets, 24);
  });
}

// ---- weights of both signs, and counts of the caller's own ----

TEST(SignedWeights, AreTakenWhereASumIsWanted) {
  Group alone = Group::solo();
  const NormalizerOptions options{.signed_weights = true};
  const Batch batch = batch_of({{1, 3, 3}}, {0.5, -2, 0}), bad = batch_of({{1, 2, 2}}, {-1, INFINITY});
  const auto share = [&](Normalizer& mean) {
    const Denominator denominator = mean.denominator(mean.count({batch}, alone, false));
    EXPECT_TRUE(mean.prepare(batch, denominator).weights.is_same(batch.weights));
    return mean.scale({{"a", at::full({}, -6.0)}}, denominator).item<double>() * denominator.gradient_scale;
  };
  NoDenominator sum(options);
  FixedDenominator fixed(4, options);
  Deferred deferred(std::make_unique<NoDenominator>(options));
  EXPECT_EQ(share(sum), -6);
  EXPECT_EQ(share(fixed), -1.5);
  EXPECT_EQ(share(deferred), -6);
  const auto refused = [&](Normalizer&& mean, const Batch& of) {
    return error_of([&] { mean.count({of}, alone, false); });
  };
  EXPECT_THAT(refused(NoDenominator(options), bad),
              AllOf(HasSubstr("weights[1]"), HasSubstr("a finite number")));
  EXPECT_THAT(refused(NoDenominator(), batch), AllOf(HasSubstr("weights[1]"), HasSubstr("signed_weights")));
  EXPECT_THAT(refused(WeightedMean(), batch), HasSubstr("0 or more"));
  EXPECT_THAT(error_of([&] { WeightedMean{options}; }),
              AllOf(HasSubstr("weighted_mean"), HasSubstr("nothing to divide by")));
  EXPECT_THAT(error_of([&] { SampleMean{options}; }), HasSubstr("sample_mean"));
  EXPECT_THAT(error_of([&] { TokenMean{options}; }), HasSubstr("token_mean"));
  EXPECT_THAT(error_of([&] { NoDenominator({.count_samples = true, .signed_weights = true}); }),
              HasSubstr("counts samples"));
  const Denominator denominator = sum.denominator(sum.count({batch}, alone, false));
  EXPECT_THAT(error_of([&] {
                sum.scale({{"a", at::ones({}), Mean::kWeights}}, denominator);
              }),
              HasSubstr("signed weights"));
  run_ranks(2, [&](World& world) {
    NoDenominator mean(NormalizerOptions{.signed_weights = world.rank == 0});
    EXPECT_THAT(error_of([&] {
                  mean.count({batch_of({{world.rank, 1, 1}})}, world.group, false);
                }),
                HasSubstr("another kind of mean"));
  });
}

// Calls whose losses have weights of their own, divided by tokens, weights or sequences as Batch::weights
// say.
TEST(Deferred, DividesByWhatTheCallerCounts) {
  Group alone = Group::solo();
  const std::vector<std::vector<double>> of_tokens = {{1, 0, 1}, {1, 1}}, of_sequences = {{1, 0, 0}, {1, 0}},
                                         of_weights = {{0.5, 0, 2}, {0.25, 0.25}};
  for (const auto& [counts, divisor] :
       {std::pair{of_tokens, 4.0}, std::pair{of_sequences, 2.0}, std::pair{of_weights, 3.0}}) {
    Deferred mean(std::make_unique<WeightedMean>());
    mean.begin_step();
    const at::Tensor x = at::ones({}, at::kDouble).requires_grad_();
    Denominator denominator;
    for (std::size_t call = 0; call < 2; ++call) {
      const Batch batch =
          batch_of({{static_cast<std::int64_t>(call), std::ssize(counts[call]), std::ssize(counts[call])}},
                   counts[call]);
      denominator = mean.denominator(mean.count({batch}, alone, false));
      mean.scale({{"loss", x * (call == 0 ? 7.0 : -1.0)}}, denominator).backward();
    }
    EXPECT_DOUBLE_EQ(x.grad().item<double>() * denominator.gradient_scale, 6 / divisor);
    EXPECT_GT(std::abs(x.grad().item<double>() - 6 / divisor), 1) << "planted: the division forgotten";
  }
}

// ---- what is logged ----

TEST(TermSums, AddUpOverTheRanksAndCountAReplicatedTermOnce) {
  StepCounts step_counts;
  step_counts.micro_batches_by_rank = {0, 2, 1};
  const Denominator denominator{.value = 2};
  double loss = 0, values[2] = {};
  for (int rank = 0; rank < 3; ++rank) {
    step_counts.rank = rank;
    TermSums sums;
    Readings readings;
    for (int i = 0; i < step_counts.micro_batches_by_rank[static_cast<std::size_t>(rank)]; ++i)
      sums.add({{"cross_entropy", at::full({}, 3.0)},
                {"a_name_of_thirty_letters______", at::full({}, 5.0), Mean::kNone, 0.5, 1, true}},
               at::scalar_tensor(1.5 + 2.5, at::kDouble), denominator, step_counts, readings);
    ASSERT_EQ(sums.terms().size(), rank == 0 ? 0u : 2u);
    loss += sums.loss();
    for (std::size_t i = 0; i < sums.terms().size(); ++i) values[i] += sums.terms()[i].value;
    if (rank == 0) continue;
    EXPECT_EQ(sums.terms()[0].name, "cross_entropy");
    EXPECT_EQ(sums.terms()[1].name, "a_name_of_thirty_letters______");
  }
  EXPECT_DOUBLE_EQ(values[0], 4.5);
  EXPECT_DOUBLE_EQ(values[1], 10);  // rank 1's two, not rank 2's
  EXPECT_DOUBLE_EQ(loss, 3 * 1.5 + 2 * 0.5 * 5);

  TermSums one;
  Readings readings;
  const at::Tensor none = at::zeros({}, at::kDouble);
  one.add({{"a", at::ones({})}, {"b", at::ones({})}}, none, denominator, step_counts, readings);
  EXPECT_THAT(error_of([&] {
                one.add({{"b", at::ones({})}, {"a", at::ones({})}}, none, denominator, step_counts, readings);
              }),
              HasSubstr("'b' where"));
  TermSums many;
  EXPECT_THAT(error_of([&] {
                many.add(LossTerms(9, {"a", at::ones({})}), none, denominator, step_counts, readings);
              }),
              HasSubstr("9 terms"));
  EXPECT_THAT(error_of([&] {
                many.add({{std::string(31, 'a'), at::ones({})}}, none, denominator, step_counts, readings);
              }),
              HasSubstr("1 to 30 letters"));
}

}  // namespace
}  // namespace isograd
