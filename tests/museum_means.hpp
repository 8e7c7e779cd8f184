// The museum's mistakes of normalisation, put in through the seams of the normaliser and of the reducer, for
// every kind of mean; and on which batches each of them is a mistake.
#pragma once

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "toy_means.hpp"

namespace isograd::toy {

// What each exhibit is, by kind of mean: c is what token, sample and weighted means count (of a micro-batch,
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
inline const std::vector<std::string> kExhibits = {"B1",  "B2",  "B3",  "B4",  "B7",
                                                   "B11", "B12", "B19", "B30", "fragments"};

inline bool counts(Mean mean) {
  return mean != Mean::kFixed && mean != Mean::kNone;
}
inline bool applies(const std::string& exhibit, Mean mean) {
  if (exhibit == "fragments") return mean == Mean::kSamples;
  if (exhibit == "B4" || exhibit == "B7") return counts(mean);
  if (exhibit == "B2" || exhibit == "B3") return mean != Mean::kNone;
  return true;
}
// Half of the mistake is the reducer's.
inline bool averages_gradients(const std::string& exhibit) {
  return exhibit == "B1" || exhibit == "B7" || exhibit == "B19";
}

// The normaliser's part of an exhibit.
class Mistaken : public Normalizer {
 public:
  Mistaken(Mean mean, std::string exhibit)
      : Normalizer(mean, {}, mean == Mean::kFixed ? kFixedNumber : 1), exhibit_(std::move(exhibit)) {}

  Denominator denominator(const Census& census) const override {
    Denominator wrong = Normalizer::denominator(census);
    if (wrong.value == 0) return wrong;
    std::vector<double> by_rank;
    for (std::size_t r = 0; r < census.targets_by_rank.size(); ++r)
      by_rank.push_back(mean() == Mean::kSamples   ? static_cast<double>(census.samples_by_rank[r])
                        : mean() == Mean::kWeights ? census.weights_by_rank[r]
                                                   : static_cast<double>(census.targets_by_rank[r]));
    const auto rank = static_cast<std::size_t>(census.rank);
    const double own = by_rank[rank] > 0 ? by_rank[rank] : 1;
    const double fixed = mean() == Mean::kFixed ? kFixedNumber : 1;
    if (exhibit_ == "B1") wrong.value = fixed * static_cast<double>(census.micro_batches_by_rank[rank]);
    if (exhibit_ == "B2") wrong.value /= static_cast<double>(census.global_micro_batches);
    if (exhibit_ == "B3") wrong.value = counts(mean()) ? own : fixed / static_cast<double>(by_rank.size());
    if (exhibit_ == "B4")
      wrong.value = *std::find_if(by_rank.begin(), by_rank.end(), [](double amount) { return amount > 0; });
    if (exhibit_ == "B7") wrong.value = own;
    if (exhibit_ == "B11") wrong.value = fixed * static_cast<double>(census.micro_batches);
    if (exhibit_ == "B30") wrong.value = mean() == Mean::kNone ? static_cast<double>(census.targets) : 1;
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
  // What the mean counts: of all, of each rank, of each micro-batch (rank, amount).
  double all = 0;
  std::vector<double> by_rank;
  std::vector<std::pair<std::size_t, double>> by_batch;
};

inline Facts facts_of(const Dealt& dealt, Mean mean, bool weighted) {
  Facts facts;
  facts.ranks = static_cast<double>(dealt.by_rank.size());
  facts.by_rank.resize(dealt.by_rank.size());
  for (const auto& batches : dealt.by_rank) {
    facts.batches_by_rank.push_back(static_cast<double>(batches.size()));
    facts.batches += facts.batches_by_rank.back();
    facts.rounds = std::max(facts.rounds, facts.batches_by_rank.back());
  }
  using Place = std::pair<int, int>;
  std::map<Place, double> targets, amounts;  // of micro-batches
  std::map<std::int64_t, std::map<Place, double>> weights;
  std::map<std::int64_t, std::set<Place>> places;  // where a sample has valid targets
  for (std::size_t rank = 0; rank < dealt.by_rank.size(); ++rank)
    for (std::size_t m = 0; m < dealt.by_rank[rank].size(); ++m)
      targets[{static_cast<int>(rank), static_cast<int>(m)}] = 0;
  for (const Piece& piece : dealt.pieces) {
    const Sample& sample = dealt.samples[static_cast<std::size_t>(piece.sample)];
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
inline bool is_a_mistake(const std::string& exhibit, Mean mean, const Facts& facts) {
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

// The exhibits that are mistakes with some number of ranks and micro-batches, by batch; the test computes the
// same from the pieces. One rank with one micro-batch has B30 alone (B12 where it holds nothing valid): the
// mean of one mean is the mean. "fixed" and "none" have nothing to count, so that how evenly a batch is dealt
// makes no difference to them. With equal parts (even; not under random weights) a mean of means is the mean.
// Without any valid token all but B12 give 0, whatever they divide by.
struct Room {
  std::string batch, token_mean, sample_mean, weighted_mean, fixed, none;
};
inline const std::vector<Room> kMuseum = {
    {"even", "B2 B3 B4 B19 B30", "B2 B3 B4 B19 B30", "B1 B2 B3 B4 B7 B11 B19 B30", "B1 B2 B3 B11 B19 B30",
     "B1 B11 B19 B30"},
    {"uneven", "B1 B2 B3 B4 B7 B11 B19 B30", "B1 B2 B3 B4 B7 B11 B19 B30", "B1 B2 B3 B4 B7 B11 B19 B30",
     "B1 B2 B3 B11 B19 B30", "B1 B11 B19 B30"},
    {"a rank empty", "B1 B2 B3 B4 B7 B11 B19 B30", "B1 B2 B3 B4 B7 B11 B19 B30", "B1 B2 B3 B4 B7 B11 B19 B30",
     "B1 B2 B3 B11 B19 B30", "B1 B11 B19 B30"},
    {"a micro-batch empty", "B1 B2 B3 B4 B7 B11 B12 B19 B30", "B1 B2 B3 B4 B7 B11 B12 B19 B30",
     "B1 B2 B3 B4 B7 B11 B12 B19 B30", "B1 B2 B3 B11 B12 B19 B30", "B1 B11 B12 B19 B30"},
    {"one sample in five", "B1 B2 B3 B4 B7 B11 B19 B30", "B1 B2 B3 B4 B7 B11 B19 B30 fragments",
     "B1 B2 B3 B4 B7 B11 B19 B30", "B1 B2 B3 B11 B19 B30", "B1 B11 B19 B30"},
    {"packs", "B1 B2 B3 B4 B7 B11 B19 B30", "B1 B2 B3 B4 B7 B11 B19 B30 fragments",
     "B1 B2 B3 B4 B7 B11 B19 B30", "B1 B2 B3 B11 B19 B30", "B1 B11 B19 B30"},
    {"all invalid", "B12", "B12", "B12", "B12", "B12"}};

}  // namespace isograd::toy
