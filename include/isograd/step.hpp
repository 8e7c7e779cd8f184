// One optimizer step: the heart of the project (src/train/step.cpp).
#pragma once

#include <cstdint>

#include "isograd/data_parallel.hpp"
#include "isograd/loss.hpp"
#include "isograd/norm.hpp"
#include "isograd/optimizer.hpp"

namespace isograd {

struct StepOptions {
  double max_norm = 1.0;  // 0: no clipping
};

struct StepReport {
  double loss = 0;              // Σ numerators / Σ denominators over all ranks: what was differentiated
  Census census;                // global counts
  double norm = 0;              // of the whole gradient, before clipping
  double clip_coefficient = 1;  // what the gradient was multiplied by
  bool finite = true;           // false: nothing was updated, on any rank
  bool updated = false;         // false as well when the step had no valid target
};

// accumulate() then finish(); a caller who drives micro-batches himself may call the halves.
// Gradients of the step stay readable in DataParallel::views() until the next accumulate().
class Step {
 public:
  // Keeps references: all arguments outlive the Step.
  Step(ForwardLossTerms forward, DataParallel& layout, Normalizer& mean, Optimizer& optimizer,
       StepOptions options);

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
  double local_loss_sum_ = 0;
  bool accumulated_ = false;
};

}  // namespace isograd
