// Losses and the normaliser: the one place that divides (docs/losses.md, the law).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "isograd/batch.hpp"
#include "isograd/group.hpp"

namespace isograd {

// One named part of the loss: a local *sum* over this rank's tokens of this micro-batch, never a mean.
struct LossTerm {
  std::string name;
  at::Tensor sum;  // scalar, differentiable
};
using LossTerms = std::vector<LossTerm>;

// What a model's forward and loss look like to the step.
using ForwardLossTerms = std::function<LossTerms(const Batch&)>;

// What one counting collective told every rank about the step: global numbers, the same on all ranks.
struct Census {
  std::int64_t targets = 0;                   // targets that carry loss
  std::int64_t tokens = 0;                    // tokens
  std::int64_t micro_batches = 0;             // over all ranks
  bool stop_requested = false;                // by any rank
  std::vector<std::int64_t> targets_by_rank;  // [W]
};

// Plain data: what a loss is divided by, counted over the whole step before any backward.
struct Denominator {
  std::string of = "targets";  // what was counted
  std::string over = "data";   // over which axes
  double value = 0;            // 0: nothing to divide, the step is empty
};

// Counts, then scales local sums. The one division. Gradients of scaled sums are summed over ranks and
// micro-batches and are then those of one device.
class Normalizer {
 public:
  virtual ~Normalizer() = default;
  // One all-reduce of a fixed-size vector with a slot per rank. Collective.
  virtual Census count(const MicroBatches& micro_batches, Group& data, bool stop_requested) = 0;
  virtual Denominator denominator(const Census& census) const = 0;
  // Σ term sums / denominator; exactly 0 with zero gradient when the denominator is 0.
  virtual at::Tensor scale(const LossTerms& terms, const Denominator& denominator) const = 0;
};

// L = Σ_i v_i ℓ_i / N, N the valid targets of the whole step over all ranks (losses.md §1). int64 counts.
class TokenMean : public Normalizer {
 public:
  Census count(const MicroBatches& micro_batches, Group& data, bool stop_requested) override;
  Denominator denominator(const Census& census) const override;
  at::Tensor scale(const LossTerms& terms, const Denominator& denominator) const override;
};

// Σ over targets != kIgnoreIndex of -log softmax(logits)[target]. logits [T, V] (fp64, fp32 or bf16; computed
// in fp64 for fp64, else in fp32), targets [T] int64 in [0, V) or kIgnoreIndex. Returns a scalar in the
// computing type. Throws ConfigError on a target outside the vocabulary.
at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& targets);

}  // namespace isograd
