// Every kind of mean: many ranks give the gradient of one process on the whole batch, however it is cut, and
// each planted mistake is seen.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cmath>

#include "dealt_step.hpp"
#include "full_tests.hpp"
#include "isograd/error.hpp"
#include "museum_means.hpp"

namespace isograd {
namespace {

using toy::Outcome;
using toy::run;
using toy::worst_error;

constexpr double kExact = 1e-10;  // E1: in fp64, of the scale s of each parameter
const Mean kMeans[] = {Mean::kTargets, Mean::kSamples, Mean::kWeights, Mean::kFixed, Mean::kNone};

constexpr int kNumbersOfRanks[] = {1, 2, 3, 4, 5, 8};
class EveryMean : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, EveryMean, ::testing::ValuesIn(kNumbersOfRanks));

// Every deal under every mean; accumulated or not by turns, and both with ISOGRAD_FULL_TESTS=1.
TEST_P(EveryMean, GivesTheGradientOfOneProcess) {
  const int ranks = GetParam();
  double worst = 0;
  int cases = 0, faults = 0, harmless = 0, unguarded = 0;
  for (int accumulation : {1, 3}) {
    auto place = static_cast<std::size_t>(ranks);
    for (const std::string& name : toy::kDeals)
      for (Mean mean : kMeans) {
        if (!full_tests() && takes_first(place++) != (accumulation == 1)) continue;
        const bool weighted = mean != Mean::kTargets;
        const auto dealt = toy::deal(name, ranks, accumulation, weighted);
        const auto wanted = toy::reference(toy::Model(), dealt, mean, weighted);
        const std::string where =
            fmt::format("{}, {}, {} ranks, accumulation {}", name_of(mean), name, ranks, accumulation);
        const Outcome outcome = run(dealt, {.mean = [&] { return toy::make_normalizer(mean); }});
        const bool empty = name == "all invalid";
        ++cases;
        for (const auto& report : outcome.reports) {
          EXPECT_NEAR(report.loss, wanted.loss, 1e-12 * std::max(1.0, wanted.loss)) << where;
          EXPECT_EQ(report.updated, !empty) << where;
          EXPECT_TRUE(report.finite) << where;
          ASSERT_EQ(report.terms.size(), 1u);
          EXPECT_EQ(report.terms[0].name, "cross_entropy");
          EXPECT_NEAR(report.terms[0].value, wanted.loss, 1e-12 * std::max(1.0, wanted.loss)) << where;
        }
        if (empty) {
          for (const auto& gradients : outcome.gradients)
            for (const auto& gradient : gradients) EXPECT_EQ(gradient.abs().max().item<double>(), 0) << where;
        } else {
          const double error = worst_error(outcome, wanted);
          worst = std::max(worst, error);
          EXPECT_LE(error, kExact) << where;
        }
        // Each exhibit that is a mistake here must be seen, and each other one must be none.
        const auto facts = toy::facts_of(dealt, mean, weighted);
        int found = 0;
        for (const std::string& exhibit : toy::kExhibits) {
          const bool mistake = toy::is_a_mistake(exhibit, mean, facts);
          if (!mistake && (empty || !toy::applies(exhibit, mean))) continue;
          const Outcome wrong =
              run(dealt, {.mean = [&] { return std::make_unique<toy::Mistaken>(mean, exhibit); },
                          .averages = toy::averages_gradients(exhibit),
                          .checked = false});
          if (!mistake) {
            ++harmless;
            EXPECT_LE(worst_error(wrong, wanted), kExact) << exhibit << " is a mistake: " << where;
            EXPECT_TRUE(wrong.reports[0].finite) << exhibit << " is a mistake: " << where;
            continue;
          }
          ++found;
          if (exhibit == "B12")
            EXPECT_FALSE(wrong.reports[0].finite) << exhibit << " passed: " << where;
          else
            EXPECT_GT(worst_error(wrong, wanted), 1e-6) << exhibit << " passed: " << where;
        }
        faults += found;
        unguarded += found == 0;
      }
  }
  EXPECT_EQ(unguarded, 0);
  std::printf(
      "%d ranks: %d cases, largest error %.2e of %.0e allowed; %d planted mistakes seen, %d shown to be "
      "none, "
      "%d cases without any\n",
      ranks, cases, worst, kExact, faults, harmless, unguarded);
}

// What debug builds do in every step: ranks that divide by different numbers stop, instead of training on.
TEST(CheckedDenominators, FindRanksThatDivideDifferently) {
  for (int ranks : {2, 3, 4, 5, 8})
    for (Mean mean : {Mean::kTargets, Mean::kSamples, Mean::kWeights}) {
      const auto dealt = toy::deal("uneven", ranks, 3, mean != Mean::kTargets);
      EXPECT_NO_THROW(run(dealt, {.mean = [&] { return toy::make_normalizer(mean); }, .checked = true}));
      for (const char* exhibit : {"B3", "B7"})
        EXPECT_THROW(run(dealt, {.mean = [&] { return std::make_unique<toy::Mistaken>(mean, exhibit); },
                                 .averages = toy::averages_gradients(exhibit),
                                 .checked = true}),
                     BrokenInvariant)
            << exhibit << ", " << name_of(mean) << ", " << ranks << " ranks";
    }
}

// The table of the museum is what arithmetic says, and no case of the matrix is without a mistake.
TEST(TheMuseum, HasAnExhibitForEveryCase) {
  int cases = 0, exhibits = 0, unguarded = 0;
  for (const auto& room : toy::kMuseum) {
    const std::string* const expected[] = {&room.token_mean, &room.sample_mean, &room.weighted_mean,
                                           &room.fixed, &room.none};
    for (std::size_t kind = 0; kind < std::size(kMeans); ++kind) {
      const Mean mean = kMeans[kind];
      const bool weighted = mean != Mean::kTargets;
      std::set<std::string> shown;
      for (int ranks : kNumbersOfRanks)
        for (int accumulation : {1, 3}) {
          const auto facts =
              toy::facts_of(toy::deal(room.batch, ranks, accumulation, weighted), mean, weighted);
          int here = 0;
          for (const std::string& exhibit : toy::kExhibits)
            if (toy::is_a_mistake(exhibit, mean, facts)) ++here, shown.insert(exhibit);
          ++cases, exhibits += here, unguarded += here == 0;
          EXPECT_GT(here, 0) << name_of(mean) << ", " << room.batch << ", " << ranks
                             << " ranks, accumulation " << accumulation;
        }
      std::string found;
      for (const std::string& exhibit : toy::kExhibits)
        if (shown.contains(exhibit)) found += (found.empty() ? "" : " ") + exhibit;
      EXPECT_EQ(found, *expected[kind]) << name_of(mean) << ", " << room.batch;
    }
  }
  EXPECT_EQ(toy::kMuseum.size(), toy::kDeals.size());
  std::printf("%d cases, %d mistakes in them, %d cases without any\n", cases, exhibits, unguarded);
}

// Random samples, cut at random places, dealt at random.
RC_GTEST_PROP(SampleMeanOf, AnyPartition, ()) {
  const int ranks = *rc::gen::inRange(1, 6), accumulation = *rc::gen::inRange(1, 4);
  const bool weighted = *rc::gen::arbitrary<bool>();
  toy::Dealt dealt;
  const int samples = *rc::gen::inRange(1, 7);
  for (int s = 0; s < samples; ++s) {
    const std::int64_t length = *rc::gen::inRange(1, 25);
    dealt.samples.push_back(
        toy::make_sample(length, static_cast<std::uint64_t>(100 + s), *rc::gen::inRange(0, 6) == 0));
    auto cuts = *rc::gen::container<std::vector<std::int64_t>>(*rc::gen::inRange(0, 5),
                                                               rc::gen::inRange<std::int64_t>(0, length + 1));
    cuts.push_back(0);
    cuts.push_back(length);
    std::sort(cuts.begin(), cuts.end());
    for (std::size_t i = 0; i + 1 < cuts.size(); ++i)
      dealt.pieces.push_back(
          {s, cuts[i], cuts[i + 1], *rc::gen::inRange(0, ranks), *rc::gen::inRange(0, accumulation)});
  }
  std::vector<int> micro_batches(static_cast<std::size_t>(ranks));
  for (const auto& piece : dealt.pieces) {
    int& most = micro_batches[static_cast<std::size_t>(piece.rank)];
    most = std::max(most, piece.micro_batch + 1);
  }
  toy::build(dealt, micro_batches, weighted);
  for (Mean mean : {Mean::kSamples, weighted ? Mean::kWeights : Mean::kTargets}) {
    const auto wanted = toy::reference(toy::Model(), dealt, mean, weighted);
    const Outcome outcome = run(dealt, {.mean = [&] { return toy::make_normalizer(mean); }});
    RC_ASSERT(std::abs(outcome.reports[0].loss - wanted.loss) < 1e-12 * std::max(1.0, wanted.loss));
    if (wanted.loss != 0) RC_ASSERT(worst_error(outcome, wanted) <= kExact);
  }
}

// Every sample given twice, under ids of its own; and the samples dealt to the ranks in another order.
TEST(EveryMeanIs, TheSameForTheDoubledAndThePermutedBatch) {
  for (int ranks : {1, 3, 4})
    for (Mean mean : {Mean::kTargets, Mean::kSamples, Mean::kWeights}) {
      const bool weighted = mean != Mean::kTargets;
      for (const char* name : {"uneven", "packs", "one sample in five"}) {
        const auto once = toy::deal(name, ranks, 3, weighted);
        auto twice = once, rotated = once;
        for (auto& batches : twice.by_rank)
          for (std::size_t i = 0, n = batches.size(); i < n; ++i) {
            Batch copy = batches[i];
            for (auto& id : copy.sample_ids) id += 600;  // even: parity of ids is seen by the model
            batches.push_back(copy);
          }
        std::rotate(rotated.by_rank.begin(), rotated.by_rank.begin() + ranks / 2, rotated.by_rank.end());
        const auto make = [&] { return toy::make_normalizer(mean); };
        const Outcome wanted = run(once, {.mean = make});
        for (const auto& changed : {twice, rotated}) {
          const Outcome same = run(changed, {.mean = make});
          EXPECT_LT(toy::worst_error(same.gradients[0], wanted.gradients[0]), 1e-12) << name_of(mean) << name;
          EXPECT_NEAR(same.reports[0].loss, wanted.reports[0].loss, 1e-12);
        }
        const Outcome sum = run(twice, {.mean = [] { return std::make_unique<NoDenominator>(); }});
        EXPECT_NEAR(sum.reports[0].loss /
                        run(once, {.mean = [] { return std::make_unique<NoDenominator>(); }}).reports[0].loss,
                    2, 1e-12);
      }
    }
}

}  // namespace
}  // namespace isograd
