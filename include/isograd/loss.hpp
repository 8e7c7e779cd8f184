// Losses. First token-level losses, each a *sum* Σ_i w_i ℓ_i over this micro-batch's tokens; then the
// normaliser, the only place that divides.
//
// Optional weights [T] are constants ≥ 0, floating or bool (a mask). A token without target (kIgnoreIndex) or
// with weight 0 is invalid: it adds exactly 0 and gets exactly zero gradient, even where its values are NaN;
// a NaN in a valid token shows. fp64 is computed in fp64, fp32 and bf16 in fp32 with sums over tokens in
// fp64; results are scalars of the computing type. ConfigError: targets outside the vocabulary; negative, NaN
// or infinite weights; shapes that do not match.
#pragma once

#include "isograd/error.hpp"

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

// A vocabulary sharded over ranks that hold the same tokens: this rank's logits are those of the entries from
// `first` on. Targets stay indices into the whole vocabulary. Every loss below is the whole loss on every
// rank, with the same bits; it costs one all-gather of three or four numbers per token in the forward (the
// fused loss has one per tile of tokens). Each rank gets the gradients of its logits and weight. The gradient
// of `hidden` is a part of a sum, so hidden must come out of enter() or enter_cut() (tensor_parallel.hpp).
// Collective.
struct VocabularyShard {
  Group group = Group::solo();
  std::int64_t first = 0;
  std::int64_t vocabulary = 0;  // size of the whole vocabulary; 0: the logits are whole
};

// ---- language modelling ----

struct CrossEntropyOptions {
  at::Tensor weights{};  // [T]; undefined: all 1
  double label_smoothing =
      0;  // ε in [0, 1]: ℓ = (1 − ε) (−log p_target) + ε · mean over the vocabulary of −log p
  double z_loss = 0;  // adds z · (log Σ_j exp x_j)² to each token's ℓ (PaLM, Chowdhery et al. 2022, §5)
  VocabularyShard shard{};
};

// Σ −log softmax(logits)[target]; logits [T, V], targets [T] int64 in [0, V) or kIgnoreIndex. First
// derivatives only. The gradient may overwrite logits that nothing else uses.
at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& targets);
at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& targets,
                             const CrossEntropyOptions& options);

// Σ_i w_i (log Σ_j exp x_ij)² alone, for a term with its own name or denominator. Targets say which tokens
// are valid. Multiply by the coefficient.
at::Tensor z_loss_sum(const at::Tensor& logits, const at::Tensor& targets, const at::Tensor& weights = {},
                      const VocabularyShard& shard = {});

// log softmax(logits)[target] per token, [T] in the computing type, differentiable; 0 for ignored tokens.
at::Tensor token_log_probabilities(const at::Tensor& logits, const at::Tensor& targets,
                                   const VocabularyShard& shard = {});

// ---- output projection and cross entropy fused, without whole logits ----

struct LinearCrossEntropyOptions {
  at::Tensor weights{};  // as in CrossEntropyOptions
  double label_smoothing = 0;
  double z_loss = 0;
  at::Tensor bias{};  // [V]; undefined: none
  VocabularyShard shard{};

  // Speed and memory only. 0: a tile of logits takes half the size of the weight's gradient, 2 to 64 MiB. A
  // tile narrower than the vocabulary costs a fourth matrix product when gradients are needed.
  std::int64_t tile_tokens = 0;
  std::int64_t tile_vocabulary = 0;
};

struct LinearCrossEntropy {
  at::Tensor sum;                // differentiable: Σ_i w_i (ℓ_i + z · lse_i²)
  at::Tensor cross_entropy;      // detached: Σ_i w_i ℓ_i
  at::Tensor z_loss;             // detached: Σ_i w_i lse_i², without the coefficient
  at::Tensor log_probabilities;  // detached: log p of each target [T], 0 for invalid tokens
};

// cross_entropy_sum(hidden · weightᵀ + bias, targets), hidden [T, H], weight [V, H]. Logits exist one tile at
// a time. The forward also computes the gradients of hidden, weight and bias while a tile exists, and
// backward multiplies them by the upstream scalar: as many matrix products as without fusing, and none for
// inputs that need no gradient. The weight's gradient is accumulated in fp32 (fp64 for fp64), tile by tile in
// order; bf16 products have bf16 results. A weight that is used elsewhere too (tied embedding) gets the sum
// through autograd. Terms of one sum share a denominator; a z-loss with another one passes z · (denominator
// of the sum / own).
LinearCrossEntropy linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                        const at::Tensor& targets,
                                        const LinearCrossEntropyOptions& options = {});
// Returns `.sum` of linear_cross_entropy().
at::Tensor linear_cross_entropy_sum(const at::Tensor& hidden, const at::Tensor& weight,
                                    const at::Tensor& targets, const LinearCrossEntropyOptions& options = {});

// ---- regression, diffusion ----

// Σ_i w_i · mean over a token's elements of (prediction − target)²; both [T, ...] of one shape.
at::Tensor squared_error_sum(const at::Tensor& prediction, const at::Tensor& target,
                             const at::Tensor& weights = {});

// Flow matching on straight paths x_t = (1 − t) x0 + t x1 from noise x0 to data x1: the squared error of the
// predicted velocity against x1 − x0 (Lipman et al. 2023, arXiv 2210.02747, with σ_min = 0; rectified flow,
// Liu et al. 2022, arXiv 2209.03003). Code whose time runs from data to noise exchanges x0 and x1.
at::Tensor flow_matching_sum(const at::Tensor& velocity, const at::Tensor& x0, const at::Tensor& x1,
                             const at::Tensor& weights = {});
// x_t = (1 − t) x0 + t x1, the model's input; t [T] in [0, 1], x0 and x1 [T, ...].
at::Tensor flow_matching_input(const at::Tensor& x0, const at::Tensor& x1, const at::Tensor& t);

// ---- reinforcement learning ----

struct PolicyGradientOptions {
  at::Tensor weights{};  // [T]; undefined: all 1. Prompt tokens and padding: 0
  // log-probabilities [T] under the policy that sampled. Undefined: no importance ratio, ℓ = −A log p
  // (REINFORCE, Williams 1992).
  at::Tensor old_log_probabilities{};
  // PPO's clip (Schulman et al. 2017, arXiv 1707.06347, eq. 7): limits the ratio to [1 − clip_low, 1 +
  // clip_high]. Negative: off.
  double clip_low = -1;
  double clip_high = -1;
};

struct PolicyLoss {
  at::Tensor sum;  // differentiable in the log-probabilities
  // Detached, weighted sums over valid tokens; divide them by the loss's denominator.
  at::Tensor clipped;         // tokens whose clip is active: no gradient
  at::Tensor approximate_kl;  // (r − 1) − log r, an unbiased estimate ≥ 0 of KL(old ‖ new) (Schulman 2020)
};

// ℓ = −r A with r = exp(log p − log p_old), or −min(r A, clip(r) A). log_probabilities, advantages [T];
// advantages and old log-probabilities are constants.
PolicyLoss policy_gradient(const at::Tensor& log_probabilities, const at::Tensor& advantages,
                           const PolicyGradientOptions& options = {});

// Σ_i w_i (exp(d_i) − d_i − 1), d = reference − log p: an estimate of KL(policy ‖ reference) for tokens drawn
// from the policy, differentiable in log_probabilities (the penalty of GRPO, Shao et al. 2024, arXiv
// 2402.03300, eq. 4).
at::Tensor reference_kl_sum(const at::Tensor& log_probabilities,
                            const at::Tensor& reference_log_probabilities, const at::Tensor& weights = {});

// ---- the normaliser: counts before any backward, then the one division (docs/losses.md) ----

// The denominator of a sum. All numbers are global: over every rank and micro-batch of the step.
enum class Mean {
  kStep,          // for a term: the same as the step's normaliser
  kTargets,       // N, valid targets
  kSamples,       // B, samples with a valid token; each token already has weight w_i / T_b
  kWeights,       // Σ w_i over valid targets
  kTokens,        // all tokens, also those without target; for terms only
  kMicroBatches,  // G, global micro-batches: the largest number of any rank
  kFixed,         // a number that the caller gives
  kNone,          // no division: a pure sum, or a loss that is normalised already
};
const char* name_of(Mean mean);  // "token_mean", "sample_mean", ...

// One named part of the loss: a local *sum* over this rank's tokens of this micro-batch, never a mean. The
// step's loss is Σ over terms of weight · sum / denominator. Each term is logged separately, without its
// weight.
struct LossTerm {
  std::string name;
  at::Tensor sum{};  // scalar, differentiable
  Mean mean = Mean::kStep;
  double weight = 1;
  double denominator = 1;  // kFixed
  // True: the value is the whole loss and the same on every rank (a gathered ranking loss), not a share, and
  // is logged once. Its gradients must still sum to the right one over the ranks.
  bool replicated = false;
  // True: the term uses statistics of the whole step (BalanceLoss of scope kStep), so it cannot be part of a
  // deferred mean, whose calls each see a part of the step.
  bool of_whole_step = false;
};
using LossTerms = std::vector<LossTerm>;

// A term's value over the whole step: Σ numerators / its denominator, without its weight.
struct TermValue {
  std::string name;
  double value = 0;
};

// A model's forward and loss, as the step calls them, with a prepared batch.
using ForwardLossTerms = std::function<LossTerms(const Batch&)>;

// Counts of a step: global numbers, the same on all ranks, except `sample_sizes` and `rank`.
struct Census {
  std::int64_t targets = 0;                     // targets that carry loss
  std::int64_t tokens = 0;                      // tokens
  std::int64_t micro_batches = 0;               // over all ranks
  bool stop_requested = false;                  // by any rank
  std::vector<std::int64_t> targets_by_rank{};  // [W]

  int rank = 0;                           // of this object
  std::int64_t global_micro_batches = 0;  // most micro-batches of any rank: the step's global micro-batches
  std::int64_t call_micro_batches = 0;    // of the last call of a deferred step; otherwise the same number
  double weights = 0;                     // Σ w_i over valid targets; = targets where no batch has weights
  std::int64_t samples =
      0;  // samples with T_b > 0, each once. This and the next two are counted for sample means only
  std::int64_t silent =
      0;                 // samples without a valid token, dropped (a split one counts on each of its ranks)
  std::int64_t cut = 0;  // samples that are split over several ranks
  std::vector<double> weights_by_rank{};                    // [W]
  std::vector<std::int64_t> samples_by_rank{};              // [W]; a split sample counts on its lowest rank
  std::vector<std::int64_t> micro_batches_by_rank{};        // [W]
  std::unordered_map<std::int64_t, double> sample_sizes{};  // T_b by id, of the samples on this rank

  int first_with_micro_batches() const;  // lowest rank that has one; 0 when none has
};

// The denominator of a loss, counted over the whole step before any backward. Plain data.
struct Denominator {
  std::string of = "targets";  // what was counted
  std::string over = "data";   // over which axes
  // 0: the step is empty and nothing is divided. Infinite: this rank's replica is empty, and its share is 0.
  // For a deferred mean always 1: a call without targets may have other terms.
  double value = 0;
  // A deferred mean divides once, at the end: the pass that clips and updates multiplies the reduced gradient
  // by this; 0: nothing was counted so far. Otherwise 1.
  double gradient_scale = 1;
  bool is_empty() const { return value == 0 || gradient_scale == 0; }  // no weight moves

  Mean mean = Mean::kTargets;
  // Denominators of terms with another mean than kStep.
  double targets = 0, weights = 0, samples = 0, tokens = 0, micro_batches = 0;
  std::vector<double> by_replica{};                         // for means of replicas: the value of each
  std::unordered_map<std::int64_t, double> sample_sizes{};  // T_b by id, of the samples on this rank

  // Returns the denominator of `term`; 0 where there is nothing to divide. ConfigError: a sample mean without
  // samples counted, a fixed denominator that is not positive.
  double of_term(const LossTerm& term) const;
};

struct NormalizerOptions {
  // R > 1: the ranks are R replicas, outermost (axis dp_replicate), and the loss is the mean over replicas of
  // each one's own mean (normalise_over without dp_replicate). It depends on how samples are assigned. The
  // denominator is R · N_r under the same sum. A replica with nothing to count is not counted in R, and a
  // term that it has anyway is 0 there. Each term counts separately; tokens and micro-batches are counted
  // over all replicas.
  int replicas = 1;
  // Counts samples although the step's own mean does not need them, because a term has Mean::kSamples.
  bool count_samples = false;
};

// Counts, then scales local sums. The only division. Gradients of scaled sums, summed over ranks and
// micro-batches, are those of one device.
class Normalizer {
 public:
  virtual ~Normalizer() = default;

  // Counts the step. Collective, before any forward: one all-reduce of a fixed-size vector with a slot per
  // rank, and, when samples are counted and some are split over ranks, an all-gather of one row per split
  // sample and rank. Bad input of any rank is a ConfigError on every rank: weights that are negative or not
  // finite, weights under the token mean, sample ids or lengths that contradict one another, ranks with
  // different means.
  virtual Census count(const MicroBatches& micro_batches, Group& data, bool stop_requested);
  virtual Denominator denominator(const Census& census) const;
  // Returns the batch with the weights that the forward's sums need. Cheap: shares all tensors except the
  // weights.
  virtual Batch prepare(const Batch& batch, const Denominator& denominator) const;
  // Returns Σ weight · sum / denominator over the terms, in fp64; exactly 0 with zero gradient where a
  // denominator is 0. A term with weight 0 is only logged. ConfigError on a term that is not a scalar, that
  // was divided already, or whose gradient begins in 16 bits: the division would be rounded to 16 bits (in
  // bf16 by up to 0.2 %), a wrong scale of the whole gradient. Deferred divides nothing here and accepts
  // plain sums in 16 bits.
  virtual at::Tensor scale(const LossTerms& terms, const Denominator& denominator) const;

  // True: the mean is counted over several calls, between begin_step() and the optimizer's update.
  virtual bool deferred() const { return false; }
  virtual void begin_step() {}
  // Returns the same mean for batches that are known beforehand (e.g. of an evaluation): itself, unless
  // deferred.
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

// L = Σ_i ℓ_i / N; N = valid targets of the whole step over all ranks (losses.md §1). int64 counts. Batches
// with weights are refused: use WeightedMean (Σ w ℓ / Σ w) or FixedDenominator (Σ w ℓ / a number).
class TokenMean : public Normalizer {
 public:
  explicit TokenMean(NormalizerOptions options = {}) : Normalizer(Mean::kTargets, options) {}
};

// L = (1/B) Σ_b (1/T_b) Σ_{i∈b} w_i ℓ_i (losses.md §2). A sample may be split into fragments over packs,
// micro-batches and ranks. Needs Batch::sample_targets, from which a rank knows which of its samples are
// split.
class SampleMean : public Normalizer {
 public:
  explicit SampleMean(NormalizerOptions options = {}) : Normalizer(Mean::kSamples, options) {}
};

// L = Σ_i w_i ℓ_i / Σ_i w_i (losses.md §3).
class WeightedMean : public Normalizer {
 public:
  explicit WeightedMean(NormalizerOptions options = {}) : Normalizer(Mean::kWeights, options) {}
};

// L = Σ_i w_i ℓ_i / the caller's number, which must be the same on every rank.
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

// Any of these means, for a caller who learns late which batches belong to a step (losses.md §4). Raw sums
// are differentiated, counts accumulate over the calls of a step, and the denominator's gradient_scale
// divides once at the end. All terms share one denominator (ConfigError otherwise). A sample mean needs whole
// samples in each call: a sample of an earlier call is refused.
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

// Returns the weights [T] that the sum of a term with this mean needs, from a prepared batch; undefined: all
// 1.
at::Tensor weights_for(const Batch& prepared, Mean mean);

// Collective. BrokenInvariant on every rank unless the ranks divide by the same numbers. Debug builds call it
// in every step (StepOptions::check_denominators).
void check_agreement(const Denominator& denominator, Group& data);
bool debug_build();

// ---- for your own training loop ----

// Counts valid targets of all micro-batches of all ranks of the data axes. Collective: one all-reduce, before
// any forward.
std::int64_t count_valid_tokens(const MicroBatches& micro_batches, Group& data);

// For a loss that is a mean over this micro-batch's `local_valid` tokens. Forward value: Σ over ranks of
// mean_loss · local_valid, divided by `global_valid`; backward: upstream · local_valid / global_valid.
// Gradients summed over micro-batches and ranks are then those of the token mean.
//
// With local_valid = 0 the micro-batch adds exactly 0, even if its mean is NaN. Backward still runs through
// all nodes, so that their exchanges with other ranks happen, but leaves no gradient; layouts and
// sync_context_gradients() contribute zeros for it. With global_valid = 0 the value is 0. A 16-bit mean is
// refused, as in Normalizer::scale. Collective, one all-reduce per call: every rank calls it equally often,
// with a constant for micro-batches it lacks (PeerError that says so otherwise). ConfigError when the ranks
// disagree on `global_valid`.
at::Tensor gradient_accumulate_loss(const at::Tensor& mean_loss, std::int64_t local_valid,
                                    std::int64_t global_valid, Group& data);

// Sums the parameters' gradients over `context`, the ranks that hold other parts of the same samples and are
// not in the gradients' own reduction. Call it once, after the last backward of a step: a second call
// multiplies the sum by the group's size. A parameter without gradient contributes zeros and then has one.
// Collective: the same parameters in the same order on every rank.
void sync_context_gradients(const std::vector<at::Tensor>& parameters, Group& context);

// Deferred normalisation without Step: any number of calls, then one number that divides the reduced
// gradient. Accumulate in fp32 or wider. Every rank makes the same calls, with no micro-batches where it has
// none.
//   for each call: for (const Batch& batch : accumulator.begin_call(batches))
//                    accumulator.raw_loss(forward(batch)).backward();
//   sum the gradients over the ranks once; multiply them by finish().gradient_scale; clip; update.
class DeferredAccumulator {
 public:
  DeferredAccumulator(std::unique_ptr<Normalizer> mean, Group data);
  // Counts; returns the batches with the weights that their sums need. Collective.
  MicroBatches begin_call(const MicroBatches& micro_batches);
  // Returns the undivided sum to call backward() on. One denominator for all terms (ConfigError otherwise).
  at::Tensor raw_loss(const LossTerms& terms);

  struct Result {
    double gradient_scale = 0;  // 1 / the denominator of all calls together; 0: nothing was counted
    double loss = 0;            // of all calls and ranks together
    Census census;
  };
  // Ends the step; the next call begins another. Collective.
  Result finish();

 private:
  Deferred mean_;
  Group data_;
  Census census_;
  Denominator denominator_;
  double sum_ = 0;
};

// ---- router balance ----

// Over which batch a balance loss takes its averages.
enum class Scope {
  kStep,        // the whole step, all micro-batches of all ranks
  kMicroBatch,  // the i-th micro-batches of all ranks together; the loss is the mean over these. It depends
                // on the number of ranks and on the split into micro-batches
};

struct BalanceLossOptions {
  std::string name = "balance";
  std::int64_t experts = 0;
  std::int64_t layers = 1;  // layers with a router
  bool pooled = false;      // averages over the tokens of all layers together, as in transformers' Mixtral;
                            // off: the mean of the layers' own losses
  double weight = 1;        // in the step's loss; the logged value is without it
  Scope scope = Scope::kStep;  // does not depend on how the step is split
};

// A product of batch averages, which is not a sum over micro-batches and ranks (docs/losses.md): E · Σ_e f_e
// P_e (Fedus et al. 2022, arXiv 2101.03961, eq. 4). f_e is the fraction of routed places that expert e got,
// not differentiated; P_e is the mean router probability of e; both over the tokens of the scope, on all
// ranks. The value is 1 where all experts get the same. (transformers' load_balancing_loss_func counts places
// per token, so its value is k times this one's.) f_e is all-reduced, then P_e is a summed term.
//
// Scope kStep: before each step a pass without gradient calls collect() for each micro-batch, then
// finish_collecting() once (collective); then each forward calls term(). ConfigError when term() sees more
// tokens than were collected: the routing is another step's.
// Scope kMicroBatch: each forward calls term(). One collective per call, so every rank calls it equally often
// (StepOptions::even_micro_batches gives ranks with fewer micro-batches empty ones).
class BalanceLoss {
 public:
  BalanceLoss(BalanceLossOptions options, Group data);  // ConfigError: no experts

  // For each layer: probabilities [T, E] (differentiable), chosen [T, k] int64 in [0, E). T may be 0.
  LossTerm term(const std::vector<at::Tensor>& probabilities, const std::vector<at::Tensor>& chosen);
  LossTerm term(const at::Tensor& probabilities, const at::Tensor& chosen) {
    return term(std::vector<at::Tensor>{probabilities}, {chosen});
  }

  void collect(const std::vector<at::Tensor>& chosen);
  void collect(const at::Tensor& chosen) { collect(std::vector<at::Tensor>{chosen}); }
  void finish_collecting();

 private:
  std::int64_t rows() const { return options_.pooled ? 1 : options_.layers; }
  // [rows(), E + 1] int64: places by expert, tokens
  at::Tensor counts_of(const std::vector<at::Tensor>& chosen) const;
  void check_layers(std::size_t found) const;

  BalanceLossOptions options_;
  Group data_;
  at::Tensor counts_;  // of the step: this rank's while collecting, then of all ranks
  bool collected_ = false;
  std::int64_t tokens_left_ = 0;  // collected tokens of this rank that no term() has seen
};

}  // namespace isograd
