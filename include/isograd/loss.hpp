// Losses: token-level losses, each a *sum* Σ_i w_i ℓ_i over this micro-batch's tokens; then the normaliser,
// the only place that divides. Weights [T] are constants >= 0, floating or bool. A token without target
// (kIgnoreIndex) or with weight 0 is invalid: it adds exactly 0 and gets zero gradient, even where its values
// are NaN. fp64 is computed in fp64, the rest in fp32 with sums over tokens in fp64. ConfigError: targets
// outside the vocabulary; negative, NaN or infinite weights; shapes that do not match.
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

// A vocabulary sharded over ranks that hold the same tokens: this rank's logits begin at entry `first`;
// targets index the whole vocabulary. Every loss below is then the whole one on every rank, with the same
// bits. Collective: one all-gather of 3 or 4 numbers per token. `hidden` must come out of copy_to_tp() or
// gather_from_sequence() (tensor_parallel.hpp), since its gradient is a part of a sum.
struct VocabularyShard {
  Group group = Group::solo();
  std::int64_t first = 0;
  std::int64_t vocabulary = 0;  // size of the whole vocabulary; 0: the logits are whole
};

// ---- language modelling ----

struct CrossEntropyOptions {
  at::Tensor weights{};  // [T]; undefined: all 1
  // ε in [0, 1]: ℓ = (1 − ε) (−log p_target) + ε · mean over the vocabulary of −log p
  double label_smoothing = 0;
  double z_loss = 0;  // adds z · (log Σ_j exp x_j)² to each token's ℓ (PaLM, Chowdhery et al. 2022, §5)
  VocabularyShard shard{};
};

// Σ −log softmax(logits)[target]; logits [T, V], targets [T]. Differentiable once; may overwrite unused
// logits.
at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& targets);
at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& targets,
                             const CrossEntropyOptions& options);

// Σ_i w_i (log Σ_j exp x_ij)², without coefficient; targets say which tokens are valid.
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

  // Speed. 0: tiles take half the weight gradient's size, 2 to 64 MiB; narrow ones cost a fourth product.
  std::int64_t tile_tokens = 0;
  std::int64_t tile_vocabulary = 0;
};

struct LinearCrossEntropy {
  at::Tensor sum;                // differentiable: Σ_i w_i (ℓ_i + z · lse_i²)
  at::Tensor cross_entropy;      // detached: Σ_i w_i ℓ_i
  at::Tensor z_loss;             // detached: Σ_i w_i lse_i², without the coefficient
  at::Tensor log_probabilities;  // detached: log p of each target [T], 0 for invalid tokens
};

// cross_entropy_sum(hidden · weightᵀ + bias, targets), hidden [T, H], weight [V, H], with logits one tile at
// a time. The forward also computes the gradients, which backward multiplies by the upstream scalar: as many
// matrix products as without fusing. The weight's gradient is accumulated in fp32 (fp64 for fp64).
LinearCrossEntropy linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                        const at::Tensor& targets,
                                        const LinearCrossEntropyOptions& options = {});
// Returns `.sum` of linear_cross_entropy().
at::Tensor linear_cross_entropy_sum(const at::Tensor& hidden, const at::Tensor& weight,
                                    const at::Tensor& targets, const LinearCrossEntropyOptions& options = {});

// ---- losses of log-probabilities with signed weights, as sums (policy gradients, preferences, distillation)
// ----

enum class RowLoss { kCrossEntropy, kImportanceSampling, kPpo, kCispo, kDro, kGspo };
struct RowLossOptions {
  double clip_low = 0.8, clip_high = 1.2;  // of the ratio: kPpo, kCispo, kGspo
  double beta = 0;                         // kDro
  VocabularyShard shard{};  // whose rows of weight and b are given; a too comes out of copy_to_tp()
};
struct RowLossInputs {
  at::Tensor targets{};                    // [T] or, for kCrossEntropy, [T, K] int64
  at::Tensor weights{};                    // kCrossEntropy: as targets, any finite numbers
  at::Tensor old_log_probabilities{};      // [T], the others: q
  at::Tensor advantages{};                 // [T], the others
  at::Tensor ratio_mask{};                 // [T], kGspo: tokens whose mean log-ratio is the sequence's
  std::vector<std::int64_t> cu_seqlens{};  // [F + 1], kGspo's sequences
};
struct RowLossResult {
  at::Tensor sum;                // differentiable: Σ over rows, nothing is divided
  at::Tensor log_probabilities;  // detached, of the targets' shape: of every row, also of weight 0
  at::Tensor value;              // detached: the sum in fp64
};
// The rows' log-probabilities are those of softmax(hidden · weightᵀ + scale (hidden · aᵀ) bᵀ), hidden [T, H],
// weight [V, H]; `update`: null or an adapter's of the head. Logits are made a tile at a time; formulas in
// docs/losses_reference.md.
struct LowRankUpdate {
  at::Tensor a, b;  // [r, H], [V, r]
  double scale = 1;
};
// ConfigError: shapes, a target outside the vocabulary, numbers that are not finite, a NaN in
// old_log_probabilities, clip limits that are negative or in the wrong order.
RowLossResult linear_row_loss(const at::Tensor& hidden, const at::Tensor& weight, const RowLossInputs& inputs,
                              RowLoss loss, const RowLossOptions& options = {},
                              const LowRankUpdate* update = nullptr);

// ---- regression, diffusion ----

// Σ_i w_i · mean over a token's elements of (prediction − target)²; both [T, ...] of one shape.
at::Tensor squared_error_sum(const at::Tensor& prediction, const at::Tensor& target,
                             const at::Tensor& weights = {});

// Flow matching on x_t = (1 − t) x0 + t x1: the squared error of the velocity against x1 − x0 (Lipman et al.
// 2023, arXiv 2210.02747, σ_min = 0; rectified flow, Liu et al. 2022, arXiv 2209.03003). In both papers x0 is
// noise and x1 data; the video model runs from data to noise, and its velocity has the other sign.
at::Tensor flow_matching_sum(const at::Tensor& velocity, const at::Tensor& x0, const at::Tensor& x1,
                             const at::Tensor& weights = {});
// x_t = (1 − t) x0 + t x1, the model's input; t [T] in [0, 1], x0 and x1 [T, ...].
at::Tensor flow_matching_input(const at::Tensor& x0, const at::Tensor& x1, const at::Tensor& t);

// ---- reinforcement learning ----

struct PolicyGradientOptions {
  at::Tensor weights{};  // [T]; undefined: all 1. Prompt tokens and padding: 0
  // [T], of the policy that sampled. Undefined: no ratio, ℓ = −A log p (REINFORCE, Williams 1992).
  at::Tensor old_log_probabilities{};
  // PPO (Schulman et al. 2017, 1707.06347, eq. 7): the ratio's limits [1 − low, 1 + high]. Negative: off.
  double clip_low = -1;
  double clip_high = -1;
};

struct PolicyLoss {
  at::Tensor sum;  // differentiable in the log-probabilities
  // Detached, weighted sums over valid tokens; divide them by the loss's denominator.
  at::Tensor clipped;         // tokens whose clip is active: no gradient
  at::Tensor approximate_kl;  // (r − 1) − log r, an unbiased estimate ≥ 0 of KL(old ‖ new) (Schulman 2020)
};

// ℓ = −r A with r = exp(log p − log p_old), or −min(r A, clip(r) A). All are [T]; advantages are constants.
PolicyLoss policy_gradient(const at::Tensor& log_probabilities, const at::Tensor& advantages,
                           const PolicyGradientOptions& options = {});

// Σ_i w_i (exp(d_i) − d_i − 1), d = reference − log p ≈ KL(policy ‖ reference) (GRPO, arXiv 2402.03300, eq.
// 4).
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

// One named part of the loss: a local *sum* over this micro-batch, never a mean. The step's loss is Σ over
// terms of weight · sum / denominator. Terms are logged without their weight.
struct LossTerm {
  std::string name;
  at::Tensor sum{};  // scalar, differentiable
  Mean mean = Mean::kStep;
  double weight = 1;
  double denominator = 1;  // kFixed
  // Already the whole loss on every rank (a ranking loss), logged once; its gradients must still sum up
  // right.
  bool replicated = false;
  // Uses statistics of the whole step (BalanceLoss), so it cannot be part of a deferred mean.
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

// Wishes of a rank for all ranks once the step is made; they travel with the step's counts.
struct Requests {
  Requests(bool stop_requested = false, bool save_requested = false)  // NOLINT: of a stop alone, a bool
      : stop(stop_requested), save(save_requested) {}
  bool stop, save;
};

// Counts of a step: global numbers, the same on all ranks, except `sample_sizes` and `rank`.
struct StepCounts {
  std::int64_t targets = 0;                             // targets that carry loss
  std::int64_t tokens = 0;                              // tokens
  std::int64_t micro_batches = 0;                       // over all ranks
  bool stop_requested = false, save_requested = false;  // by any rank
  std::vector<std::int64_t> targets_by_rank{};          // [W]

  int rank = 0;                           // of this object
  std::int64_t global_micro_batches = 0;  // most micro-batches of any rank: the step's global micro-batches
  std::int64_t call_micro_batches = 0;    // of the last call of a deferred step; otherwise the same number
  double weights = 0;                     // Σ w_i over valid targets; = targets where no batch has weights
  // For sample means: samples with T_b > 0, each once; those without valid token (a split one on each rank).
  std::int64_t samples = 0, silent = 0;
  std::int64_t cut = 0;                                     // samples that are split over several ranks
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
  // 0: the step is empty. Infinite: this rank's replica is empty. Always 1 for a deferred mean.
  double value = 0;
  // A deferred mean divides once, at the end: the update multiplies the gradient by this; 0: nothing counted.
  double gradient_scale = 1;
  bool is_empty() const { return value == 0 || gradient_scale == 0; }  // no weight moves

  Mean mean = Mean::kTargets;
  bool signed_weights = false;  // their sum is no denominator
  // Denominators of terms with another mean than kStep.
  double targets = 0, weights = 0, samples = 0, tokens = 0, micro_batches = 0;
  std::vector<double> by_replica{};                         // for means of replicas: the value of each
  std::unordered_map<std::int64_t, double> sample_sizes{};  // T_b by id, of the samples on this rank

  // 0 where there is nothing to divide. ConfigError: a sample mean without samples counted, a fixed one <= 0.
  double of_term(const LossTerm& term) const;
};

struct NormalizerOptions {
  // R > 1: the loss is the mean over R replicas (axis dp_replicate, outermost) of each one's own mean. The
  // denominator is R · N_r, counted for each term; replicas with nothing to count are left out of R. Tokens
  // and micro-batches are counted over all replicas.
  int replicas = 1;
  // Counts samples although the step's own mean does not need them, because a term has Mean::kSamples.
  bool count_samples = false;
  // Batch::weights may be negative. Under NoDenominator and FixedDenominator alone, also deferred: the other
  // means divide by a sum of weights (ConfigError).
  bool signed_weights = false;
};

// Counts, then scales local sums: the only division.
class Normalizer {
 public:
  virtual ~Normalizer() = default;

  // Collective, before any forward: one all-reduce with a slot per rank, and an all-gather where samples are
  // split over ranks. ConfigError on every rank for bad input of any: weights negative, not finite or under
  // the token mean; contradictory samples; ranks with different means.
  virtual StepCounts count(const MicroBatches& micro_batches, Group& data, Requests requests);
  virtual Denominator denominator(const StepCounts& step_counts) const;
  // Returns the batch with the weights that the forward's sums need; shares all other tensors.
  virtual Batch prepare(const Batch& batch, const Denominator& denominator) const;
  // Σ weight · sum / denominator in fp64; exactly 0 with zero gradient where a denominator is 0. ConfigError:
  // a term that is no scalar, was divided already, or whose gradient begins in 16 bits (the division would be
  // rounded to 16 bits). Deferred divides nothing here and accepts sums in 16 bits.
  virtual at::Tensor scale(const LossTerms& terms, const Denominator& denominator) const;

  // True: the mean is counted over several calls, between begin_step() and the optimizer's update.
  virtual bool deferred() const { return false; }
  virtual void begin_step() {}
  // The same mean for batches that are known beforehand, e.g. of an evaluation.
  virtual Normalizer& undeferred() { return *this; }

  Mean mean() const { return mean_; }
  const NormalizerOptions& options() const { return options_; }

 protected:
  explicit Normalizer(Mean mean, NormalizerOptions options = {}, double fixed = 1);
  friend class Deferred;
  StepCounts count(const MicroBatches& micro_batches, Group& data, Requests requests,
                   const std::set<std::int64_t>& earlier_samples);

 private:
  Mean mean_;
  NormalizerOptions options_;
  double fixed_;
};

// A normaliser of one mean over the whole step and all ranks (docs/losses.md): L = Σ ℓ_i / N, which
// refuses weights; (1/B) Σ_b (1/T_b) Σ_{i∈b} w_i ℓ_i, for samples that may be split over packs, micro-batches
// and ranks (needs Batch::sample_targets); Σ w_i ℓ_i / Σ w_i; and the pure sum, or a loss that the caller has
// normalised.
template <Mean kMean>
class MeanOf : public Normalizer {
 public:
  explicit MeanOf(NormalizerOptions options = {}) : Normalizer(kMean, options) {}
};
using TokenMean = MeanOf<Mean::kTargets>;
using SampleMean = MeanOf<Mean::kSamples>;
using WeightedMean = MeanOf<Mean::kWeights>;
using NoDenominator = MeanOf<Mean::kNone>;

// L = Σ_i w_i ℓ_i / the caller's number, which must be the same on every rank.
class FixedDenominator : public Normalizer {
 public:
  explicit FixedDenominator(double value, NormalizerOptions options = {})
      : Normalizer(Mean::kFixed, options, value) {}
};

// Any of these means, counted over several calls (docs/losses.md): raw sums are differentiated, and
// gradient_scale divides once at the end. All terms share one denominator, and samples must be whole in each
// call (ConfigError). A WeightedMean divides by Σ Batch::weights, whatever weights the loss has used: who
// counts by himself writes there what counts.
class Deferred : public Normalizer {
 public:
  explicit Deferred(std::unique_ptr<Normalizer> of);
  StepCounts count(const MicroBatches& micro_batches, Group& data, Requests requests) override;
  Denominator denominator(const StepCounts& step_counts) const override;
  at::Tensor scale(const LossTerms& terms, const Denominator& denominator) const override;
  bool deferred() const override { return true; }
  void begin_step() override;
  Normalizer& undeferred() override { return *of_; }

 private:
  std::unique_ptr<Normalizer> of_;
  StepCounts total_;  // of the step so far
  std::set<std::int64_t> samples_;
};

// The weights [T] that a term with this mean needs, from a prepared batch; undefined: all 1.
at::Tensor weights_for(const Batch& prepared, Mean mean);

// Collective. BrokenInvariant on every rank unless all divide by the same numbers.
void check_agreement(const Denominator& denominator, Group& data);
bool debug_build();

// ---- for your own training loop ----

// Valid targets of all micro-batches and ranks of the data axes. One all-reduce, before any forward.
std::int64_t count_valid_tokens(const MicroBatches& micro_batches, Group& data);

// For a loss that is a mean over this micro-batch's `local_valid` tokens. Value: Σ over ranks of mean_loss ·
// local_valid / global_valid; backward: upstream · local_valid / global_valid, so gradients summed over
// micro-batches and ranks are the token mean's. With local_valid = 0 it adds exactly 0, even for a NaN;
// backward still runs through all nodes. Collective: every rank calls it equally often (PeerError otherwise).
// ConfigError: a 16-bit mean, or ranks that disagree on `global_valid`.
at::Tensor gradient_accumulate_loss(const at::Tensor& mean_loss, std::int64_t local_valid,
                                    std::int64_t global_valid, Group& data);

// Sums gradients over ranks that hold other parts of the same samples and are not in the gradients' own
// reduction. Once a step, after the last backward. Collective.
void sync_context_gradients(const std::vector<at::Tensor>& parameters, Group& context);

// Deferred normalisation without Step (examples/own_loop/deferred_loop.cpp): begin_call(), and raw_loss() and
// backward() of each of its batches, any number of times; one sum of the gradients over the ranks; then
// finish().gradient_scale times that. Accumulate in fp32 or wider. Every rank makes the same calls.
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
    StepCounts step_counts;
  };
  // Ends the step; the next call begins another. Collective.
  Result finish();

 private:
  Deferred mean_;
  Group data_;
  StepCounts step_counts_;
  Denominator denominator_;
  double sum_ = 0;
};

// ---- router balance ----

// Over which batch a balance loss takes its averages.
enum class Scope {
  kStep,        // the whole step, all micro-batches of all ranks
  kMicroBatch,  // the i-th micro-batches of all ranks together, so it depends on ranks and on the split
};

struct BalanceLossOptions {
  std::string name = "balance";
  std::int64_t experts = 0;
  std::int64_t layers = 1;     // layers with a router
  bool pooled = false;         // averages over all layers' tokens together, as in transformers' Mixtral
  double weight = 1;           // in the step's loss; the logged value is without it
  Scope scope = Scope::kStep;  // does not depend on how the step is split
};

// E · Σ_e f_e P_e (Fedus et al. 2022, arXiv 2101.03961, eq. 4; transformers' value is k times this one's).
// f_e: fraction of routed places that expert e got, without gradient; P_e: mean router probability; both over
// the scope's tokens on all ranks. Scope kStep: a pass without gradient calls collect() for each micro-batch
// and finish_collecting() once (collective); then each forward calls term(). ConfigError when term() sees
// more tokens than were collected. Scope kMicroBatch: each forward calls term(), a collective
// (StepOptions::even_micro_batches).
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
