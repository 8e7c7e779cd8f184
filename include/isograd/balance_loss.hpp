// Router balance: a loss term that is a product of batch averages, so that it does not decompose over
// micro-batches and ranks by itself (docs/losses.md).
#pragma once

#include "isograd/cxx20.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "isograd/normalizer.hpp"

namespace isograd {

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
