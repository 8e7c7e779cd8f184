// Every kind of mean: many ranks give the gradient of one process on the whole batch, however it is cut, and
// each planted mistake is seen.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "full_tests.hpp"
#include "isograd/error.hpp"
#include "toy_means.hpp"

namespace isograd {
namespace toy {
namespace {

// ---- the museum's mistakes of normalisation, for every kind of mean, and in which batches each is one ----

// Each exhibit, by kind of mean: c is what token, sample and weighted means count (of a micro-batch,
// of a rank, of all), D the fixed number, W the ranks, M the micro-batches of all ranks, G_r those of a rank.
//
//              token, sample, weighted            fixed                      none
//   B1         own c, then G_r; ranks averaged    D, then G_r; averaged      G_r; averaged
//   B2         c of all / G                       D / G                      -
//   B3         own rank's c                       D / W on each rank         -
//   B4         c of the first rank that has any   -                          -
//   B7         own rank's c; ranks averaged       -                          -
//   B11        own c, then M                      D, then M                  M
//   B12        mean over the valid tokens times their number: 0/0 where a micro-batch has none, all kinds
//   B19        gradients averaged over the ranks, all kinds
//   B30        1                                  1                          divided by the tokens all the
//   same fragments  sample mean: T_b of the tokens at hand
//
// "-": there is nothing to get wrong. A sum that is to stay a sum knows no forgotten division (B2, B3), a
// given number is no count of one replica's (B4), and B7 without a count is B19. B1 and B11 give the same
// numbers where all ranks have equally many micro-batches, B3 and B4 where they hold equally much.
const std::vector<std::string> kExhibits = {"B1",  "B2",  "B3",  "B4",  "B7",
                                            "B11", "B12", "B19", "B30", "fragments"};

bool counts(Mean mean) { return mean != Mean::kFixed && mean != Mean::kNone; }
bool applies(const std::string& exhibit, Mean mean) {
  if (exhibit == "fragments") return mean == Mean::kSamples;
  if (exhibit == "B4" || exhibit == "B7") return counts(mean);
  if (exhibit == "B2" || exhibit == "B3") return mean != Mean::kNone;
  return true;
}
// Half of the mistake is the reducer's.
bool averages_gradients(const std::string& exhibit) {
  return exhibit == "B1" || exhibit == "B7" || exhibit == "B19";
}

// The normaliser's part of an exhibit.
class Mistaken : public Normalizer {
 public:
  Mistaken(Mean mean, std::string exhibit)
      : Normalizer(mean, {}, mean == Mean::kFixed ? kFixedNumber : 1), exhibit_(std::move(exhibit)) {}

  Denominator denominator(const StepCounts& step_counts) const override {
    Denominator wrong = Normalizer::denominator(step_counts);
    if (wrong.value == 0) return wrong;
    std::vector<double> by_rank;
    for (std::size_t r = 0; r < step_counts.targets_by_rank.size(); ++r)
      by_rank.push_back(mean() == Mean::kSamples   ? static_cast<double>(step_counts.samples_by_rank[r])
                        : mean() == Mean::kWeights ? step_counts.weights_by_rank[r]
                                                   : static_cast<double>(step_counts.targets_by_rank[r]));
    const auto rank = static_cast<std::size_t>(step_counts.rank);
    const double own = by_rank[rank] > 0 ? by_rank[rank] : 1;
    const double fixed = mean() == Mean::kFixed ? kFixedNumber : 1;
    if (exhibit_ == "B1") wrong.value = fixed * static_cast<double>(step_counts.micro_batches_by_rank[rank]);
    if (exhibit_ == "B2") wrong.value /= static_cast<double>(step_counts.global_micro_batches);
    if (exhibit_ == "B3") wrong.value = counts(mean()) ? own : fixed / static_cast<double>(by_rank.size());
    if (exhibit_ == "B4")
      wrong.value = *std::find_if(by_rank.begin(), by_rank.end(), [](double amount) { return amount > 0; });
    if (exhibit_ == "B7") wrong.value = own;
    if (exhibit_ == "B11") wrong.value = fixed * static_cast<double>(step_counts.micro_batches);
    if (exhibit_ == "B30") wrong.value = mean() == Mean::kNone ? static_cast<double>(step_counts.targets) : 1;
    return wrong;
  }

  Batch prepare(const Batch& batch, const Denominator& denominator) const override {
    const at::Tensor valid = batch.targets.ne(kIgnoreIndex).to(at::kDouble);
    const at::Tensor weights = batch.weights.defined() ? valid * batch.weights : valid;
    std::map<std::int64_t, double> sizes;  // of the samples at hand
    for (std::size_t f = 0; f < batch.sample_ids.size(); ++f)
      sizes[batch.sample_ids[f]] +=
          weights.slice(0, batch.cu_seqlens[f], batch.cu_seqlens[f + 1]).sum().item<double>();
    valid_ = valid.sum().item<double>();
    own_ = mean() == Mean::kWeights ? weights.sum().item<double>() : valid_;
    if (mean() == Mean::kSamples)
      own_ = static_cast<double>(
          std::count_if(sizes.begin(), sizes.end(), [](const auto& sample) { return sample.second > 0; }));
    Denominator used = denominator;
    if (exhibit_ == "fragments") used.sample_sizes = {sizes.begin(), sizes.end()};
    return Normalizer::prepare(batch, used);
  }

  at::Tensor scale(const LossTerms& terms, const Denominator& denominator) const override {
    if (exhibit_ == "B12") return terms[0].sum / valid_ * valid_ / denominator.value;
    if ((exhibit_ != "B1" && exhibit_ != "B11") || !counts(mean()))
      return Normalizer::scale(terms, denominator);
    Denominator own = denominator;
    own.value *= own_ > 0 ? own_ : 1;
    return Normalizer::scale(terms, own);
  }

 private:
  std::string exhibit_;
  mutable double valid_ = 0, own_ = 0;  // of the micro-batch prepared last: its valid targets; its c
};

// A step as the exhibits see it, counted from its pieces.
struct Facts {
  double ranks = 0, batches = 0, rounds = 0;  // W, M, G
  std::vector<double> batches_by_rank;        // G_r
  double targets = 0;
  bool idle = false;  // a micro-batch without a valid target
  bool cut = false;   // a sample with valid targets in several micro-batches
  // The amount that the mean counts: of all, of each rank, of each micro-batch (rank, amount).
  double all = 0;
  std::vector<double> by_rank;
  std::vector<std::pair<std::size_t, double>> by_batch;
};

Facts facts_of(const Assignment& assigned, Mean mean, bool weighted) {
  Facts facts;
  facts.ranks = static_cast<double>(assigned.by_rank.size());
  facts.by_rank.resize(assigned.by_rank.size());
  for (const auto& batches : assigned.by_rank) {
    facts.batches_by_rank.push_back(static_cast<double>(batches.size()));
    facts.batches += facts.batches_by_rank.back();
    facts.rounds = std::max(facts.rounds, facts.batches_by_rank.back());
  }
  using Place = std::pair<int, int>;
  std::map<Place, double> targets, amounts;  // of micro-batches
  std::map<std::int64_t, std::map<Place, double>> weights;
  std::map<std::int64_t, std::set<Place>> places;  // where a sample has valid targets
  for (std::size_t rank = 0; rank < assigned.by_rank.size(); ++rank)
    for (std::size_t m = 0; m < assigned.by_rank[rank].size(); ++m)
      targets[{static_cast<int>(rank), static_cast<int>(m)}] = 0;
  for (const Piece& piece : assigned.pieces) {
    const Sample& sample = assigned.samples[static_cast<std::size_t>(piece.sample)];
    const at::Tensor valid = sample.targets.slice(0, piece.begin, piece.end).ne(kIgnoreIndex).to(at::kDouble);
    const double number = valid.sum().item<double>();
    const double weight =
        weighted ? (valid * sample.weights.slice(0, piece.begin, piece.end)).sum().item<double>() : number;
    const Place place{piece.rank, piece.micro_batch};
    targets[place] += number;
    facts.targets += number;
    weights[piece.sample][place] += weight;
    if (number > 0) places[piece.sample].insert(place);
    amounts[place] += mean == Mean::kWeights ? weight : mean == Mean::kSamples ? 0 : number;
  }
  for (const auto& [place, number] : targets) facts.idle = facts.idle || number == 0;
  for (const auto& [sample, at] : places) {
    facts.cut = facts.cut || at.size() > 1;
    if (mean != Mean::kSamples) continue;
    double whole = 0;
    for (const auto& [place, weight] : weights[sample]) {
      whole += weight;
      if (weight > 0) amounts[place] += 1;
    }
    // A sample is counted on the lowest rank that holds valid targets of it.
    if (whole > 0) facts.by_rank[static_cast<std::size_t>(at.begin()->first)] += 1;
  }
  for (const auto& [place, amount] : amounts) {
    const auto rank = static_cast<std::size_t>(place.first);
    facts.by_batch.emplace_back(rank, amount);
    if (mean != Mean::kSamples) facts.by_rank[rank] += amount;
  }
  for (double amount : facts.by_rank) facts.all += amount;
  return facts;
}

// Whether the exhibit gives another gradient than the right one, by arithmetic.
bool is_a_mistake(const std::string& exhibit, Mean mean, const Facts& facts) {
  if (!applies(exhibit, mean)) return false;
  if (exhibit == "B12") return facts.idle;
  if (facts.targets == 0) return false;  // 0 divided by whatever
  // Some part's own amount, times the number of parts that it is averaged over, is not that of all.
  const auto differs = [&](auto&& parts_of_batch) {
    return std::any_of(facts.by_batch.begin(), facts.by_batch.end(), [&](const auto& batch) {
      const double parts = parts_of_batch(batch.first);
      return batch.second > 0 && (counts(mean) ? batch.second * parts != facts.all : parts != 1);
    });
  };
  const auto differs_by_rank = [&](double parts) {
    return std::any_of(facts.by_rank.begin(), facts.by_rank.end(),
                       [&](double amount) { return amount > 0 && amount * parts != facts.all; });
  };
  if (exhibit == "B1")
    return differs([&](std::size_t rank) { return facts.ranks * facts.batches_by_rank[rank]; });
  if (exhibit == "B2") return facts.rounds > 1;
  if (exhibit == "B3") return counts(mean) ? differs_by_rank(1) : facts.ranks > 1;
  if (exhibit == "B4")
    return *std::find_if(facts.by_rank.begin(), facts.by_rank.end(),
                         [](double amount) { return amount > 0; }) != facts.all;
  if (exhibit == "B7") return differs_by_rank(facts.ranks);
  if (exhibit == "B11") return differs([&](std::size_t) { return facts.batches; });
  if (exhibit == "B19") return facts.ranks > 1;
  if (exhibit == "fragments") return facts.cut;
  return mean == Mean::kFixed ? kFixedNumber != 1 : (counts(mean) ? facts.all : facts.targets) != 1;  // B30
}

}  // namespace
}  // namespace toy

namespace {

using toy::Outcome;
using toy::run;
using toy::worst_error;

constexpr double kExact = 1e-10;  // E1: in fp64, of the scale s of each parameter
const Mean kMeans[] = {Mean::kTargets, Mean::kSamples, Mean::kWeights, Mean::kFixed, Mean::kNone};

constexpr int kNumbersOfRanks[] = {1, 2, 3, 4, 5, 8};
class EveryMean : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, EveryMean, ::testing::ValuesIn(kNumbersOfRanks));

// Every assignment under every mean; accumulated or not by turns, and exhibits that are no mistake here on up
// to 3 ranks. Above, one that is a mistake and half of the others. ISOGRAD_FULL_TESTS=1: both, on all.
TEST_P(EveryMean, GivesTheGradientOfOneProcess) {
  const int ranks = GetParam();
  double worst = 0;
  int cases = 0, faults = 0, harmless = 0, unguarded = 0;
  for (int accumulation : {1, 3}) {
    auto place = static_cast<std::size_t>(ranks);
    for (const std::string& name : toy::kAssignments)
      for (Mean mean : kMeans) {
        if (!full_tests() && takes_first(place++) != (accumulation == 1)) continue;
        const bool weighted = mean != Mean::kTargets;
        const auto assigned = toy::assign(name, ranks, accumulation, weighted);
        const auto wanted = toy::reference(toy::Model(), assigned, mean, weighted);
        const std::string where =
            fmt::format("{}, {}, {} ranks, accumulation {}", name_of(mean), name, ranks, accumulation);
        const Outcome outcome = run(assigned, {.mean = [&] { return toy::make_normalizer(mean); }});
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
        const auto facts = toy::facts_of(assigned, mean, weighted);
        int found = 0;
        std::size_t turn = place;
        for (const std::string& exhibit : toy::kExhibits) {
          const bool mistake = toy::is_a_mistake(exhibit, mean, facts);
          if (!mistake && (empty || !toy::applies(exhibit, mean) || (!full_tests() && ranks > 3))) continue;
          if (!full_tests() && ranks > 3 && found > 0 && takes_first(turn++)) continue;
          const Outcome wrong =
              run(assigned, {.mean = [&] { return std::make_unique<toy::Mistaken>(mean, exhibit); },
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
      "%d ranks: %d cases, largest error %.2e of %.0e allowed; %d planted mistakes seen, %d harmless\n",
      ranks, cases, worst, kExact, faults, harmless);
}

// Debug builds check in every step: ranks that divide by different numbers stop, instead of training on.
TEST(CheckedDenominators, FindRanksThatDivideDifferently) {
  for (int ranks : {2, 3, 4, 5, 8})
    for (Mean mean : {Mean::kTargets, Mean::kSamples, Mean::kWeights}) {
      const auto assigned = toy::assign("uneven", ranks, 3, mean != Mean::kTargets);
      EXPECT_NO_THROW(run(assigned, {.mean = [&] { return toy::make_normalizer(mean); }, .checked = true}));
      for (const char* exhibit : {"B3", "B7"})
        EXPECT_THROW(run(assigned, {.mean = [&] { return std::make_unique<toy::Mistaken>(mean, exhibit); },
                                    .averages = toy::averages_gradients(exhibit),
                                    .checked = true}),
                     BrokenInvariant)
            << exhibit << ", " << name_of(mean) << ", " << ranks << " ranks";
    }
}

// Random samples, cut at random places, assigned at random.
RC_GTEST_PROP(SampleMeanOf, AnyPartition, ()) {
  const int ranks = *rc::gen::inRange(1, 6), accumulation = *rc::gen::inRange(1, 4);
  const bool weighted = *rc::gen::arbitrary<bool>();
  toy::Assignment assigned;
  const int samples = *rc::gen::inRange(1, 7);
  for (int s = 0; s < samples; ++s) {
    const std::int64_t length = *rc::gen::inRange(1, 25);
    assigned.samples.push_back(
        toy::make_sample(length, static_cast<std::uint64_t>(100 + s), *rc::gen::inRange(0, 6) == 0));
    auto cuts = *rc::gen::container<std::vector<std::int64_t>>(*rc::gen::inRange(0, 5),
                                                               rc::gen::inRange<std::int64_t>(0, length + 1));
    cuts.push_back(0);
    cuts.push_back(length);
    std::sort(cuts.begin(), cuts.end());
    for (std::size_t i = 0; i + 1 < cuts.size(); ++i)
      assigned.pieces.push_back(
          {s, cuts[i], cuts[i + 1], *rc::gen::inRange(0, ranks), *rc::gen::inRange(0, accumulation)});
  }
  std::vector<int> micro_batches(static_cast<std::size_t>(ranks));
  for (const auto& piece : assigned.pieces) {
    int& most = micro_batches[static_cast<std::size_t>(piece.rank)];
    most = std::max(most, piece.micro_batch + 1);
  }
  toy::build(assigned, micro_batches, weighted);
  for (Mean mean : {Mean::kSamples, weighted ? Mean::kWeights : Mean::kTargets}) {
    const auto wanted = toy::reference(toy::Model(), assigned, mean, weighted);
    const Outcome outcome = run(assigned, {.mean = [&] { return toy::make_normalizer(mean); }});
    RC_ASSERT(std::abs(outcome.reports[0].loss - wanted.loss) < 1e-12 * std::max(1.0, wanted.loss));
    if (wanted.loss != 0) RC_ASSERT(worst_error(outcome, wanted) <= kExact);
  }
}

}  // namespace
}  // namespace isograd
