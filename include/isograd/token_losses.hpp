// Token-level losses, each a *sum* Σ_i w_i ℓ_i over the tokens at hand; what it is divided by is the
// normaliser's affair (loss.hpp). Optional weights [T] are constants ≥ 0, floating or bool (a mask).
// A token without target (kIgnoreIndex) or of weight 0 is invalid: it adds exactly 0 and gets exactly zero
// gradient, even where its values are NaN; a NaN in a valid token shows. fp64 is computed in fp64, fp32 and
// bf16 in fp32 with sums over tokens in fp64; results are scalars of the computing type.
// ConfigError: targets outside the vocabulary; negative, NaN or infinite weights; shapes that do not fit.
#pragma once

#include "isograd/cxx20.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>

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

}  // namespace isograd
