// The normaliser: counts before any backward, then the one division (docs/losses.md).
#pragma once

#include "isograd/cxx20.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "isograd/batch.hpp"
#include "isograd/group.hpp"

namespace isograd {

// What a sum is divided by. All numbers are global: over every rank and micro-batch of the step.
enum class Mean {
  kStep,          // of a term: whatever the step's normaliser divides by
  kTargets,       // N, valid targets
  kSamples,       // B, samples with a valid token; each token already weighs w_i / T_b
  kWeights,       // Σ w_i over valid targets
  kTokens,        // all tokens, those without target included: of terms alone
  kMicroBatches,  // G, global micro-batches: the most that any rank has
  kFixed,         // a number that the caller gives
  kNone,          // nothing: a pure sum, or a loss normalised already
};
const char* name_of(Mean mean);  // "token_mean", "sample_mean", ...

// One named part of the loss: a local *sum* over this rank's tokens of this micro-batch, never a mean. The
// step's loss is Σ over terms of weight · sum / denominator; each is logged by itself, without its weight.
struct LossTerm {
  std::string name;
  at::Tensor sum{};  // scalar, differentiable
  Mean mean = Mean::kStep;
  double weight = 1;
  double denominator = 1;  // kFixed
  // The value is the whole and the same on every rank (a gathered ranking loss), not a share: logged once.
  // Its gradient must still sum to the right one over the ranks.
  bool replicated = false;
  // Made of numbers that were collected over the whole step before it (BalanceLoss of scope kStep): no term
  // of a deferred mean, whose calls see a part each.
  bool of_whole_step = false;
};
using LossTerms = std::vector<LossTerm>;

// A term's value over the whole step, Σ numerators / its denominator, without its weight.
struct TermValue {
  std::string name;
  double value = 0;
};

// What a model's forward and loss look like to the step. The batch is a prepared one.
using ForwardLossTerms = std::function<LossTerms(const Batch&)>;

// What the counting told every rank about the step: global numbers, the same on all ranks, but for
// `sample_sizes`.
struct Census {
  std::int64_t targets = 0;                     // targets that carry loss
  std::int64_t tokens = 0;                      // tokens
  std::int64_t micro_batches = 0;               // over all ranks
  bool stop_requested = false;                  // by any rank
  std::vector<std::int64_t> targets_by_rank{};  // [W]

  int rank = 0;                           // whose Census this is
  std::int64_t global_micro_batches = 0;  // most micro-batches of any rank: the step's global micro-batches
  std::int64_t call_micro_batches = 0;  // the same of the last call of a deferred step; else the same number
  double weights = 0;                   // Σ w_i over valid targets; = targets where no batch has weights
  std::int64_t samples = 0;  // samples with T_b > 0, each once. Counted for the sample mean only, like
  std::int64_t silent = 0;   // samples without a valid token, dropped (a cut one once on each of its ranks)
  std::int64_t cut = 0;      // samples that lie on several ranks
  std::vector<double> weights_by_rank{};              // [W]
  std::vector<std::int64_t> samples_by_rank{};        // [W]; a cut sample is the lowest rank's that holds it
  std::vector<std::int64_t> micro_batches_by_rank{};  // [W]
  std::unordered_map<std::int64_t, double> sample_sizes{};  // T_b by id, of the samples on this rank

  int first_with_micro_batches() const;  // lowest rank that has one; 0 when none has
};

// Plain data: what a loss is divided by, counted over the whole step before any backward.
struct Denominator {
  std::string of = "targets";  // what was counted
  std::string over = "data";   // over which axes
  // 0: nothing to divide, the step is empty. Infinite: nothing in this rank's replica, whose share is 0.
  // Of a deferred mean always 1: a call without targets may hold other terms.
  double value = 0;
  // A deferred mean divides once, at the end: the reduced gradient is multiplied by this, by the pass that
  // clips and updates; 0: nothing was counted so far. Otherwise 1.
  double gradient_scale = 1;
  bool is_empty() const { return value == 0 || gradient_scale == 0; }  // the step so far: no weight moves

  Mean mean = Mean::kTargets;
  // For terms with another mean than kStep.
  double targets = 0, weights = 0, samples = 0, tokens = 0, micro_batches = 0;
  std::vector<double> by_replica{};                         // means of replicas only: the value of each
  std::unordered_map<std::int64_t, double> sample_sizes{};  // T_b by id, of the samples on this rank

  // What `term` is divided by; 0 where there is nothing to divide. ConfigError: a sample mean without samples
  // counted, a fixed denominator that is not positive.
  double of_term(const LossTerm& term) const;
};

struct NormalizerOptions {
  // R > 1: the ranks are R replicas, outermost (axis dp_replicate), and the loss is the mean over replicas of
  // each one's own mean, which depends on how samples are dealt out: normalise_over without dp_replicate.
  // Carried out as the denominator R · N_r under the same sum; a replica without anything to count does not
  // count in R, and a term that it has all the same is 0 there. Each term counts by itself; tokens and
  // micro-batches are counted over all replicas.
  int replicas = 1;
  // Count samples although the step's own mean does not need them: some term has Mean::kSamples.
  bool count_samples = false;
};

// Counts, then scales local sums. The one division. Gradients of scaled sums are summed over ranks and
// micro-batches and are then those of one device.
class Normalizer {
 public:
  virtual ~Normalizer() = default;

  // One all-reduce of a fixed-size vector with a slot per rank, and an all-gather of one row per cut sample
  // and rank when samples are counted and some are cut over ranks. Collective, before any forward. Bad input
  // of any rank is a ConfigError on every rank: weights that are negative or not finite, weights under the
  // token mean, sample ids or lengths that contradict what the ranks hold, ranks with different means.
  virtual Census count(const MicroBatches& micro_batches, Group& data, bool stop_requested);
  virtual Denominator denominator(const Census& census) const;
  // The batch with the weights that the forward's sums need. Cheap: shares all tensors but weights.
  virtual Batch prepare(const Batch& batch, const Denominator& denominator) const;
  // Σ weight · sum / denominator over the terms, in fp64; exactly 0 with zero gradient where a denominator is
  // 0. A term of weight 0 is logged and does nothing else, whatever its value. ConfigError on a term that is
  // no scalar, that was divided already, or whose gradient begins in 16 bits: the division would be rounded
  // to them, in bf16 by up to 0.2 %, which is a wrong scale of the whole gradient. Deferred divides nothing
  // here and takes plain sums of such losses.
  virtual at::Tensor scale(const LossTerms& terms, const Denominator& denominator) const;

  // Deferred means are counted over several calls, between begin_step() and the optimizer's update.
  virtual bool deferred() const { return false; }
  virtual void begin_step() {}
  // The same mean of batches that are known beforehand, as those of an evaluation: itself, unless deferred.
  virtual Normalizer& undeferred() { return *this; }

  Mean mean() const { return mean_; }
  const NormalizerOptions& options() const { return options_; }

 protected:
  explicit Normalizer(Mean mean, NormalizerOptions options = {}, double fixed = 1);
  friend class Deferred;
  Census count(const MicroBatches& micro_batches, Group& data, bool stop_requested,
               const std::set<std::int64_t>& earlier_samples);

 private:
  Mean mean_;
  NormalizerOptions options_;
  double fixed_;
};

// L = Σ_i v_i ℓ_i / N, N the valid targets of the whole step over all ranks (losses.md §1). int64 counts.
// Batches with weights are refused: say WeightedMean (Σ w ℓ / Σ w) or FixedDenominator (Σ w ℓ / a number).
class TokenMean : public Normalizer {
 public:
  explicit TokenMean(NormalizerOptions options = {}) : Normalizer(Mean::kTargets, options) {}
};

// L = (1/B) Σ_b (1/T_b) Σ_{i∈b} w_i ℓ_i (losses.md §2). A sample may be cut into fragments over packs,
// micro-batches and ranks. Needs Batch::sample_targets; a rank knows from it which of its samples are cut.
class SampleMean : public Normalizer {
 public:
  explicit SampleMean(NormalizerOptions options = {}) : Normalizer(Mean::kSamples, options) {}
};

// L = Σ_i w_i ℓ_i / Σ_i w_i (losses.md §3).
class WeightedMean : public Normalizer {
 public:
  explicit WeightedMean(NormalizerOptions options = {}) : Normalizer(Mean::kWeights, options) {}
};

// L = Σ_i w_i ℓ_i / the caller's number, the same on every rank.
class FixedDenominator : public Normalizer {
 public:
  explicit FixedDenominator(double value, NormalizerOptions options = {})
      : Normalizer(Mean::kFixed, options, value) {}
};

// L = Σ_i w_i ℓ_i: a pure sum, or a loss that the caller has normalised.
class NoDenominator : public Normalizer {
 public:
  explicit NoDenominator(NormalizerOptions options = {}) : Normalizer(Mean::kNone, options) {}
};

// Any of them, for a caller who learns late what belongs to a step (losses.md §4): raw sums are
// differentiated, counts add up over the calls of a step, and the denominator's gradient_scale divides once
// at the end. All terms share the one denominator (ConfigError otherwise). A sample mean needs whole samples
// in each call: a sample of an earlier call is refused.
class Deferred : public Normalizer {
 public:
  explicit Deferred(std::unique_ptr<Normalizer> of);
  Census count(const MicroBatches& micro_batches, Group& data, bool stop_requested) override;
  Denominator denominator(const Census& census) const override;
  at::Tensor scale(const LossTerms& terms, const Denominator& denominator) const override;
  bool deferred() const override { return true; }
  void begin_step() override;
  Normalizer& undeferred() override { return *of_; }

 private:
  std::unique_ptr<Normalizer> of_;
  Census total_;  // of the step so far
  std::set<std::int64_t> samples_;
};

// The weights [T] that the sum of a term with this mean needs, of a prepared batch; undefined: all 1.
at::Tensor weights_for(const Batch& prepared, Mean mean);

// Collective. BrokenInvariant, on every rank, unless the ranks divide by the same numbers. Debug builds call
// it in every step (StepOptions::check_denominators).
void check_agreement(const Denominator& denominator, Group& data);
bool debug_build();

}  // namespace isograd
