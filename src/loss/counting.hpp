// Counting a step: what a rank holds, the vector that the ranks add up, and the exchange of cut samples.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <unordered_map>

#include "isograd/loss.hpp"

namespace isograd::counting {

// Numbers that a rank writes into its slot of the counting vector; fp64 numbers as their bits.
enum CountSlot : std::int64_t {
  kTargets,
  kTokens,
  kMicroBatches,
  kStop,
  kWeightsBits,
  kHasWeights,
  kWholeSamples,   // samples with T_b > 0 that lie here in full
  kSilentSamples,  // without a valid token here
  kCutSamples,     // samples whose other fragments must lie on other ranks: rows of the exchange
  kRule,           // how this rank counts and divides: must be the same everywhere
  kRuleValueBits,
  kProblem,  // bad input found here, 0: none; then three numbers that say what
  kProblemA,
  kProblemB,
  kProblemC,
  kSlotWidth
};

// The rule to count and divide by; the same on every rank.
struct Rule {
  Mean mean = Mean::kTargets;
  bool samples = false;
  int replicas = 1;
  double fixed = 1;
};

struct Sample {
  std::int64_t held = 0;      // valid targets on this rank
  std::int64_t declared = 0;  // in the whole step
  double weight = 0;          // Σ w over the held ones
  int owner = 0;              // once the ranks' parts are joined: the lowest rank that holds some
};

// This rank's own numbers.
struct OwnCounts {
  std::vector<std::int64_t> slot;          // [kSlotWidth]
  std::map<std::int64_t, Sample> samples;  // by id; empty unless the rule counts samples
  bool is_cut(const Sample& sample) const { return sample.held > 0 && sample.held < sample.declared; }
};

OwnCounts count_own(const MicroBatches& micro_batches, const Rule& rule, bool stop_requested,
                    const std::set<std::int64_t>& earlier_samples);

// slots [W, kSlotWidth], the sum over ranks. Throws what any rank found wrong, on all ranks in the same
// words.
StepCounts merge(const at::Tensor& slots, int rank, const Rule& rule);

// Fills in the sizes of samples; one all-gather if any rank holds a part of a cut sample.
void resolve_samples(const OwnCounts& counts, const at::Tensor& slots, const Rule& rule, Group& data,
                     StepCounts& step_counts);

}  // namespace isograd::counting
