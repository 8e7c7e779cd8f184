// Token-level losses, each a *sum* Σ_i w_i ℓ_i over the tokens at hand; what it is divided by is the
// normaliser's affair (loss.hpp). Optional weights [T] are constants ≥ 0, floating or bool (a mask).
// A token without target (kIgnoreIndex) or of weight 0 is invalid: it adds exactly 0 and gets exactly zero
// gradient, even where its values are NaN; a NaN in a valid token shows. fp64 is computed in fp64, fp32 and
// bf16 in fp32 with sums over tokens in fp64; results are scalars of the computing type.
// ConfigError: targets outside the vocabulary; negative, NaN or infinite weights; shapes that do not fit.
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

// Where the vocabulary is cut over ranks that hold the same tokens: this rank's logits are those of the
// tokens from `first` on. Targets stay tokens of the whole vocabulary, and every loss below is the whole one
// on every rank, with the same bits: one all-gather of three or four numbers a token, in the forward (for the
// fused loss one for each tile of tokens). Gradients are those of this rank's logits and weight; that of
// `hidden` is this rank's part, so that hidden comes out of enter() or enter_cut() (tensor_parallel.hpp).
// Collective.
struct VocabularyShard {
  Group group = Group::solo();
  std::int64_t first = 0;
  std::int64_t vocabulary = 0;  // of all ranks together; 0: that of the logits, which are whole
};

// ---- language modelling ----

struct CrossEntropyOptions {
  at::Tensor weights{};  // [T]; undefined: all 1
  double label_smoothing =
      0;  // ε in [0, 1]: ℓ = (1 − ε) (−log p_target) + ε · mean over the vocabulary of −log p
  double z_loss = 0;  // adds z · (log Σ_j exp x_j)² to each token's ℓ (PaLM, Chowdhery et al. 2022, §5)
  VocabularyShard shard{};
};

// −log softmax(logits)[target], summed; logits [T, V], targets [T] int64 in [0, V) or kIgnoreIndex. First
// derivatives only. The gradient may be written over logits that nobody else can see.
at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& targets);
at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& targets,
                             const CrossEntropyOptions& options);

// Σ_i w_i (log Σ_j exp x_ij)² by itself, for a term with its own name or denominator. Targets say which
// tokens are valid. Multiply by the coefficient.
at::Tensor z_loss_sum(const at::Tensor& logits, const at::Tensor& targets, const at::Tensor& weights = {},
                      const VocabularyShard& shard = {});

// log softmax(logits)[target] of each token [T] in the computing type, differentiable; 0 for ignored ones.
at::Tensor token_log_probabilities(const at::Tensor& logits, const at::Tensor& targets,
                                   const VocabularyShard& shard = {});

// ---- the output projection and its cross entropy in one, without the logits ----

struct LinearCrossEntropyOptions {
  at::Tensor weights{};  // as in CrossEntropyOptions
  double label_smoothing = 0;
  double z_loss = 0;
  at::Tensor bias{};  // [V]; undefined: none
  VocabularyShard shard{};

  // Speed and memory only. 0: one tile of logits takes half of the weight's gradient, 2 to 64 MiB. One that
  // is narrower than the vocabulary costs a fourth matrix product when gradients are wanted.
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
// a time; gradients of hidden, weight and bias are made in the forward, while the tile is there, and backward
// multiplies them by the upstream scalar: as many matrix products as without fusing, and none for what needs
// no gradient. The weight's gradient is accumulated in fp32 (fp64 for fp64), tile by tile in order; bf16
// products have bf16 results. A weight used elsewhere too (tied embedding) gets the sum, through autograd.
// Terms of one sum share a denominator; a z-loss with another one passes z · (denominator of the sum / own).
LinearCrossEntropy linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                        const at::Tensor& targets,
                                        const LinearCrossEntropyOptions& options = {});
// `.sum` of the above.
at::Tensor linear_cross_entropy_sum(const at::Tensor& hidden, const at::Tensor& weight,
                                    const at::Tensor& targets, const LinearCrossEntropyOptions& options = {});

// ---- regression, diffusion ----

// Σ_i w_i · mean over a token's elements of (prediction − target)²; both [T, ...] of one shape.
at::Tensor squared_error_sum(const at::Tensor& prediction, const at::Tensor& target,
                             const at::Tensor& weights = {});

// Flow matching on straight paths x_t = (1 − t) x0 + t x1 from noise x0 to data x1: the squared error of the
// predicted velocity against x1 − x0 (Lipman et al. 2023, arXiv 2210.02747, with σ_min = 0; rectified flow,
// Liu et al. 2022, arXiv 2209.03003). Code that runs time from data to noise exchanges x0 and x1.
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
  // PPO's clip (Schulman et al. 2017, arXiv 1707.06347, eq. 7): the ratio is held within
  // [1 − clip_low, 1 + clip_high]. Off when negative.
  double clip_low = -1;
  double clip_high = -1;
};

struct PolicyLoss {
  at::Tensor sum;  // differentiable in the log-probabilities
  // Detached sums over valid tokens, weighted; divide them by what the loss is divided by.
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

// The normaliser: counts before any backward, then the one division (docs/losses.md).

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

// For people who keep their own training loop: the pieces of the step that have to be right.

// Valid targets of all micro-batches of all ranks of the data axes: one all-reduce, before any forward.
// Collective.
std::int64_t count_valid_tokens(const MicroBatches& micro_batches, Group& data);

// For a loss that comes as a mean over this micro-batch's `local_valid` tokens. Forward value: Σ over ranks
// of mean_loss · local_valid, divided by `global_valid`; backward: upstream · local_valid / global_valid. Sum
// the gradients over micro-batches and ranks and they are those of the token mean. With local_valid = 0 this
// micro-batch adds exactly 0 and gives nothing to differentiate, though its mean is NaN: backward comes by
// all nodes, so that what they exchange with other ranks is exchanged, and leaves no gradient (a rank without
// any token then has none to sum: layouts and sync_context_gradients() take part with zeros); with
// global_valid = 0 the value is 0. A mean in 16 bits is refused, as by Normalizer::scale. Collective: one
// all-reduce a call, so every rank calls it equally often, with a constant for micro-batches it lacks;
// PeerError that says so otherwise, ConfigError when the ranks disagree on `global_valid`.
at::Tensor gradient_accumulate_loss(const at::Tensor& mean_loss, std::int64_t local_valid,
                                    std::int64_t global_valid, Group& data);

// Sums the parameters' gradients over `context`, the ranks that hold other parts of the same samples and are
// not in the gradients' own reduction. Call it once, after the last backward of a step: summing what was
// summed already multiplies it by the group's size. A parameter without gradient takes part with zeros and
// then has one. Collective: the same parameters in the same order on every rank.
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
  // The undivided sum to call backward() on. One denominator for all terms (ConfigError otherwise).
  at::Tensor raw_loss(const LossTerms& terms);

  struct Result {
    double gradient_scale = 0;  // 1 / the denominator of all calls together; 0: nothing was counted
    double loss = 0;            // of all calls and ranks together
    Census census;
  };
  // Ends the step: the next call begins another. Collective.
  Result finish();

 private:
  Deferred mean_;
  Group data_;
  Census census_;
  Denominator denominator_;
  double sum_ = 0;
};

// Router balance: a loss term that is a product of batch averages, so that it does not decompose over
// micro-batches and ranks by itself (docs/losses.md).

// The batch that the averages are taken over.
enum class Scope {
  kStep,        // the whole step, all micro-batches of all ranks
  kMicroBatch,  // the i-th micro-batches of all ranks together; the loss is the mean over these. Another loss
                // for each number of ranks and each cut into micro-batches
};

struct BalanceLossOptions {
  std::string name = "balance";
  std::int64_t experts = 0;
  std::int64_t layers = 1;  // that route
  bool pooled = false;      // averages over the tokens of all layers together, as in transformers' Mixtral;
                            // off: the mean of the layers' own losses
  double weight = 1;        // in the step's loss; the logged value is without it
  Scope scope = Scope::kStep;  // the one that does not depend on how the step is cut
};

// E · Σ_e f_e P_e (Fedus et al. 2022, arXiv 2101.03961, eq. 4): f_e the fraction of routed places that expert
// e got, not differentiated; P_e the mean router probability of e. Both over the tokens of the scope, on all
// ranks: 1 where all experts get the same. (transformers' load_balancing_loss_func counts places by token, so
// that its value is k times this one's.) f_e is all-reduced, then P_e is a summed term.
//
// Scope kStep: before each step a pass without gradient calls collect() for each micro-batch, then
// finish_collecting(), collective, once; then term() in each forward. ConfigError when term() sees more
// tokens than were collected: it was another step's routing.
// Scope kMicroBatch: term() in the forward. One collective a call, so every rank calls it equally often
// (StepOptions::even_micro_batches gives ranks with fewer micro-batches empty ones).
class BalanceLoss {
 public:
  BalanceLoss(BalanceLossOptions options, Group data);  // ConfigError: no experts

  // Of each layer: probabilities [T, E] (differentiable), chosen [T, k] int64 in [0, E). T may be 0.
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
  at::Tensor counts_;  // of the step: this rank's while collecting, then all ranks'
  bool collected_ = false;
  std::int64_t tokens_left_ = 0;  // of this rank's collected ones, those that no term() has seen
};

}  // namespace isograd
