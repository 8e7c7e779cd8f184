// One optimizer step: the heart of the project (src/train/step.cpp).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "isograd/data_parallel.hpp"
#include "isograd/loss.hpp"
#include "isograd/norm.hpp"
#include "isograd/optimizer.hpp"

namespace isograd {

class TermLedger;

struct StepOptions {
  double max_norm = 1.0;  // 0: no clipping
  // Ranks with fewer micro-batches than others run the forward on empty ones too, for terms whose forward
  // holds a collective (BalanceLoss).
  bool even_micro_batches = false;
  // One more collective a step: BrokenInvariant unless the ranks divide by the same numbers.
  bool check_denominators = debug_build();
};

struct StepReport {
  double loss = 0;               // Σ numerators / Σ denominators over all ranks: what was differentiated
  std::vector<TermValue> terms;  // each term of the loss by itself; the same on all ranks
  Census census;                 // global counts
  double norm = 0;               // of the whole gradient, before clipping
  double clip_coefficient = 1;   // what the gradient was multiplied by
  double gradient_scale = 1;     // a deferred mean's: views() hold the gradient divided by this
  bool finite = true;            // false: nothing was updated, on any rank
  bool updated = false;          // false as well when the step had no valid target
};

// accumulate() then finish(); a caller who drives micro-batches himself may call the halves. With a Deferred
// mean accumulate() may be called any number of times before finish(), on every rank alike.
// Gradients of the step stay readable in DataParallel::views() until the next accumulate().
class Step {
 public:
  // Keeps references: all arguments outlive the Step.
  Step(ForwardLossTerms forward, DataParallel& layout, Normalizer& mean, Optimizer& optimizer,
       StepOptions options);
  ~Step();

  // This rank's whole part of one step, possibly none. Collective, like finish().
  void accumulate(const MicroBatches& micro_batches, bool stop_requested = false);
  StepReport finish();
  StepReport operator()(const MicroBatches& micro_batches, bool stop_requested = false);

 private:
  ForwardLossTerms forward_;
  DataParallel& layout_;
  Normalizer& mean_;
  Optimizer& optimizer_;
  StepOptions options_;
  Census census_;
  Denominator denominator_;
  std::unique_ptr<TermLedger> ledger_;
  bool accumulated_ = false;
};

}  // namespace isograd
