// One optimizer step: the heart of the project (src/train/step.cpp).
#pragma once

#include "isograd/cxx20.hpp"

#include <memory>

#include "isograd/step_options.hpp"

namespace isograd {

class StepWork;

// accumulate() then finish(); a caller who drives micro-batches himself may call the halves. With a Deferred
// mean accumulate() may be called any number of times before finish(), on every rank alike.
// Gradients of the step stay readable in DataParallel::views() until the next accumulate().
//
// The forward returns sums over its micro-batch, never means: the step divides, once. In the first step
// finish() looks for a mean in the autograd graph of each term (F::cross_entropy with its default reduction)
// and for a sum that was divided by the micro-batch's targets or tokens, and throws ConfigError on every rank
// before a weight moves. With a further factor (0.5 * mse_loss) it needs two micro-batches of different
// sizes. Not looked at: terms of Mean::kNone (NoDenominator), of Mean::kMicroBatches, replicated ones, and
// the inside of custom autograd functions.
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
  std::unique_ptr<StepWork> work_;
  bool accumulated_ = false;
};

}  // namespace isograd
