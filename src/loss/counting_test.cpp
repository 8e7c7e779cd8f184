// Counting: its cost, how exact it is, and that bad input of one rank is the same error on every rank.
#include "loss/normalizer.hpp"

#include <bit>
#include <cmath>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/shm/backend.hpp"
#include "loss/normalizer_testing.hpp"

namespace isograd {
namespace {

using namespace std::chrono_literals;
using namespace normalizer_testing;
using ::testing::AllOf;
using ::testing::HasSubstr;

// ---- counts ----

at::Tensor slots(std::vector<std::int64_t> targets, const counting::Rule& rule) {
  const auto own = counting::count_own({}, rule, false, {});
  at::Tensor all = at::zeros({static_cast<std::int64_t>(targets.size()), counting::kSlotWidth}, at::kLong);
  for (std::size_t r = 0; r < targets.size(); ++r) {
    auto* slot = all.mutable_data_ptr<std::int64_t>() + static_cast<std::int64_t>(r) * counting::kSlotWidth;
    std::copy(own.slot.begin(), own.slot.end(), slot);
    slot[counting::kTargets] = slot[counting::kTokens] = targets[r];
    slot[counting::kWeightsBits] = std::bit_cast<std::int64_t>(static_cast<double>(targets[r]));
  }
  return all;
}

TEST(Counts, AreExactBeyondWhatFp32AndInt32Hold) {
  const counting::Rule rule;
  const std::int64_t large = std::int64_t{1} << 24, huge = std::int64_t{3} << 31;
  StepCounts step_counts = counting::merge(slots({large, 1, 0}, rule), 1, rule);
  EXPECT_EQ(step_counts.targets, 16777217);
  EXPECT_EQ(TokenMean().denominator(step_counts).value, 16777217.0);
  step_counts = counting::merge(slots({huge, huge, 1}, rule), 0, rule);
  EXPECT_EQ(step_counts.targets, 12884901889);
  EXPECT_EQ(TokenMean().denominator(step_counts).value, 12884901889.0);
  EXPECT_EQ(WeightedMean().denominator(step_counts).value, 12884901889.0);
}

// One collective whatever the micro-batches, one more only when samples are cut over ranks.
TEST(Counting, CostsOneCollectiveOrTwo) {
  for (int ranks : {2, 3, 5}) {
    auto store = c10::make_intrusive<c10d::HashStore>();
    run_ranks(ranks, [&](World& world) {
      auto backend = c10::make_intrusive<ShmBackend>(store, world.rank, ranks, "counted", 60s);
      Group group(backend, "counted", 60s);
      const auto collectives = [&](Normalizer&& mean, const MicroBatches& batches) {
        const auto before = backend->getSequenceNumberForGroup();
        mean.count(batches, group, false);
        return backend->getSequenceNumberForGroup() - before;
      };
      const std::int64_t id = 1 + world.rank;
      for (std::size_t n : {std::size_t{0}, std::size_t{1}, std::size_t{50}}) {
        MicroBatches whole;
        for (std::size_t i = 0; i < n; ++i)
          whole.push_back(batch_of({{id + 100 * static_cast<std::int64_t>(i), 2, 2}}));
        EXPECT_EQ(collectives(TokenMean(), whole), 1u);
        EXPECT_EQ(collectives(WeightedMean(), whole), 1u);
        EXPECT_EQ(collectives(SampleMean(), whole), 1u);
      }
      // One sample in pieces on the first and the last rank, 20 pieces each.
      const bool holds = world.rank == 0 || world.rank == ranks - 1;
      const MicroBatches pieces(holds ? 20 : 3, holds ? batch_of({{0, 1, 40}}) : empty_batch());
      EXPECT_EQ(collectives(SampleMean(), pieces), 2u);
      EXPECT_EQ(collectives(TokenMean(), pieces), 1u);
      // Cut over micro-batches of one rank only.
      EXPECT_EQ(collectives(SampleMean(), MicroBatches(4, batch_of({{id, 1, 4}}))), 1u);
      group.barrier();
    });
  }
}

// ---- bad input: every rank gets the same words ----

std::string error_on_all(const std::vector<MicroBatches>& by_rank,
                         const std::function<std::unique_ptr<Normalizer>(int)>& make) {
  std::vector<std::string> errors(by_rank.size());
  run_ranks(static_cast<int>(by_rank.size()), [&](World& world) {
    const auto rank = static_cast<std::size_t>(world.rank);
    try {
      make(world.rank)->count(by_rank[rank], world.group, false);
    } catch (const ConfigError& error) {
      errors[rank] = error.what();
    }
    world.group.barrier();  // the group is as good as before
  });
  for (const auto& error : errors) EXPECT_EQ(error, errors[0]);
  return errors[0];
}

std::string sample_error(const std::vector<MicroBatches>& by_rank) {
  return error_on_all(by_rank, [](int) { return std::make_unique<SampleMean>(); });
}

TEST(BadInput, OfOneRankIsAnErrorOnAll) {
  const auto weighted = [](std::vector<double> weights) {
    return error_on_all(
        {{batch_of({{1, 2, 2}})}, {batch_of({{2, 1, 1}}, {1}), batch_of({{3, 2, 2}}, std::move(weights))}},
        [](int) { return std::make_unique<WeightedMean>(); });
  };
  EXPECT_THAT(weighted({1, -0.5}),
              AllOf(HasSubstr("rank 1, micro-batch 1, weights[1]: found -0.5"), HasSubstr("0 or more")));
  EXPECT_THAT(weighted({std::nan(""), 1}), HasSubstr("weights[0]: found nan"));
  EXPECT_THAT(weighted({1, HUGE_VAL}), HasSubstr("found inf"));
  EXPECT_THAT(weighted({1, 1, 1}), HasSubstr("3 weights for 2 tokens"));
  EXPECT_EQ(weighted({1, 0}), "");
  Batch integers = batch_of({{1, 2, 2}});
  integers.weights = at::ones({2}, at::kLong);
  EXPECT_THAT(sample_error({{}, {integers}}), HasSubstr("weights that are integers"));
  EXPECT_THAT(
      error_on_all({{}, {batch_of({{1, 1, 1}}, {1})}}, [](int) { return std::make_unique<TokenMean>(); }),
      AllOf(HasSubstr("weights under the token mean"),
            HasSubstr("weighted_mean for the first, fixed for the second")));
  Batch lost = batch_of({{1, 2, 2}});
  lost.targets = lost.targets.narrow(0, 0, 1);
  EXPECT_THAT(sample_error({{}, {lost}}), HasSubstr("cu_seqlens over 2 tokens, 1 targets"));
  Batch undeclared = batch_of({{1, 2, 2}});
  undeclared.sample_targets.clear();
  EXPECT_THAT(sample_error({{undeclared}, {}}), HasSubstr("1 sample ids and 0 sample_targets"));
}

TEST(BadInput, ContradictoryLengthsOfASample) {
  EXPECT_THAT(sample_error({{batch_of({{5, 2, 6}}), batch_of({{5, 2, 7}})}, {}}),
              HasSubstr("rank 0, sample 5: found fragments that declare 6 and 7"));
  EXPECT_THAT(sample_error({{}, {batch_of({{5, 2, 6}})}, {batch_of({{5, 4, 9}})}}),
              HasSubstr("declare 6 valid targets on rank 1 and 9 on rank 2"));
  EXPECT_THAT(sample_error({{batch_of({{5, 8, 6}})}, {}}),
              HasSubstr("8 valid targets on this rank alone, 6 declared"));
  // A fragment that carries another id, or is missing.
  EXPECT_THAT(sample_error({{batch_of({{5, 2, 6}})}, {batch_of({{50, 4, 6}})}}),
              AllOf(HasSubstr("sample 5: found 2 valid targets on all ranks together, 6 declared"),
                    HasSubstr("another id")));
  EXPECT_THAT(sample_error({{batch_of({{5, 2, 6}})}}), HasSubstr("2 valid targets"));
  EXPECT_EQ(sample_error({{batch_of({{5, 2, 6}})}, {batch_of({{5, 4, 6}})}}), "");
  EXPECT_THAT(
      error_on_all({{batch_of({{5, 2, 6}})}, {batch_of({{5, 4, 6}})}},
                   [](int) { return std::make_unique<SampleMean>(NormalizerOptions{.replicas = 2}); }),
      AllOf(HasSubstr("of different replicas"), HasSubstr("one of two readings")));
}

TEST(BadInput, RanksWithAnotherMean) {
  const auto differ = [](std::unique_ptr<Normalizer> (*make)(int)) {
    return error_on_all({{batch_of({{1, 1, 1}})}, {}, {}}, make);
  };
  EXPECT_THAT(differ([](int rank) -> std::unique_ptr<Normalizer> {
                if (rank == 2) return std::make_unique<WeightedMean>();
                return std::make_unique<TokenMean>();
              }),
              HasSubstr("another kind of mean on rank 2 than on rank 0"));
  EXPECT_THAT(differ([](int rank) -> std::unique_ptr<Normalizer> {
                return std::make_unique<FixedDenominator>(rank == 1 ? 3.0 : 4.0);
              }),
              HasSubstr("on rank 1"));
}

TEST(BadInput, OfTheDeclarationItself) {
  EXPECT_THAT(error_of([] { FixedDenominator(0); }), HasSubstr("above 0"));
  EXPECT_THAT(error_of([] { FixedDenominator(-2); }), HasSubstr("above 0"));
  EXPECT_THAT(error_of([] { FixedDenominator mean(HUGE_VAL); }), HasSubstr("above 0"));
  EXPECT_THAT(error_of([] { NoDenominator({.replicas = 2}); }), HasSubstr("one of two readings"));
  EXPECT_THAT(error_on_all({{}, {}, {}},
                           [](int) { return std::make_unique<TokenMean>(NormalizerOptions{.replicas = 2}); }),
              HasSubstr("3 ranks in 2 replicas"));
}

TEST(Counting, OfRanksThatDivideByOtherNumbersIsSeen) {
  EXPECT_THROW(run_ranks(2, [](World& world) { check_agreement({.value = 3.0 + world.rank}, world.group); }),
               BrokenInvariant);
}

}  // namespace
}  // namespace isograd
