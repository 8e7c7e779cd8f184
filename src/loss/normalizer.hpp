// Counting a step, and its terms as they are logged: the parts of the normaliser that `Step` and tests use.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "isograd/group.hpp"
#include "isograd/loss.hpp"
#include "layout/readings.hpp"

// Counting a step: what a rank holds, the vector that the ranks add up, and the exchange of cut samples.
namespace isograd::counting {

// Numbers that a rank writes into its slot of the counting vector; fp64 numbers as their bits.
enum CountSlot : std::int64_t {
  kTargets,
  kTokens,
  kMicroBatches,
  kStop,
  kSave,
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
  bool signed_weights = false;
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

OwnCounts count_own(const MicroBatches& micro_batches, const Rule& rule, Requests requests,
                    const std::set<std::int64_t>& earlier_samples);

// slots [W, kSlotWidth], the sum over ranks. Throws what any rank found wrong, on all ranks in the same
// words.
StepCounts merge(const at::Tensor& slots, int rank, const Rule& rule);

// Fills in the sizes of samples; one all-gather if any rank holds a part of a cut sample.
void resolve_samples(const OwnCounts& counts, const at::Tensor& slots, const Rule& rule, Group& data,
                     StepCounts& step_counts);

}  // namespace isograd::counting

// A step's loss and its terms, as they are logged: exact global values, added up with the gradient's norm.
namespace isograd {

// One rank's part of the loss and of each term. A rank without micro-batches does not know the terms.
class TermSums {
 public:
  static constexpr std::size_t kMostTerms = 8, kLongestName = 30;

  void clear();
  // One micro-batch's terms, the same ones in the same order in every micro-batch and on every rank, and the
  // share that the normaliser made of them. Numbers on a device are added when `readings` are read.
  void add(const LossTerms& terms, const at::Tensor& share, const Denominator& denominator,
           const StepCounts& step_counts, Readings& readings);
  double loss() const { return loss_; }
  const std::vector<TermValue>& terms() const { return terms_; }

 private:
  double loss_ = 0;
  std::vector<TermValue> terms_;
};

// The names of the terms, the same on all ranks. In a step only their values travel, in this order.
class TermNames {
 public:
  // Whether this rank has terms with other names than were agreed: then all ranks must agree() anew.
  bool differ_from(const std::vector<TermValue>& own) const;
  // Collective. Afterwards the names are those of the ranks that have terms. ConfigError on all ranks where
  // these differ in names or order.
  void agree(const std::vector<TermValue>& own, Group& all);
  const std::vector<std::string>& names() const { return names_; }

 private:
  std::vector<std::string> names_;
};

}  // namespace isograd
