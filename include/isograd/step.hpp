// What an optimizer step is told and what it reports (step.hpp).
#pragma once

#include "isograd/error.hpp"

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "isograd/data_parallel.hpp"
#include "isograd/loss.hpp"
#include "isograd/optimizer.hpp"

namespace isograd {

class Pipeline;

// A rank's micro-batches in a step, as a schedule runs them; each in as many parts as the rank has stages of
// a model (pipeline_parallel.hpp), one as a rule.
class MicroBatchWork {
 public:
  virtual ~MicroBatchWork() = default;
  virtual std::size_t size() const = 0;
  // Of micro-batch i, and its share of the global loss. Kept until backward(i) of the part.
  virtual void forward(std::size_t i, std::size_t part = 0) = 0;
  // Adds the share's gradient. `last`: of this rank's in the step, after which its gradient is complete.
  virtual void backward(std::size_t i, bool last, std::size_t part = 0) = 0;
  // A backward in halves: all that other ranks wait for in it, then, at any time, the gradients of
  // parameters. `last` as above, with the second. ConfigError: not of this work, or not under ZeRO-3, whose
  // units compute both at once.
  virtual void backward_inputs(std::size_t i, std::size_t part = 0);
  virtual void backward_weights(std::size_t i, bool last, std::size_t part = 0);
};
// Runs each forward once, and each backward once after its forward, of every part, whole or in halves.
using MicroBatchSchedule = std::function<void(MicroBatchWork& work)>;
void one_after_another(MicroBatchWork& work);  // forward and backward by turns, in order

// Runs before the first forward of each accumulate(), on this rank's micro-batches (of a step with
// even_micro_batches all that it will have) and over the ranks that see different data: for terms that must
// know something of the whole step (BalanceLoss). Collective; without gradient. recomputing() is true in it:
// the forwards that follow count, so that buffers which a forward changes (running statistics) are changed
// once.
using LookAhead = std::function<void(const MicroBatches& micro_batches, const Group& data)>;

// Numbers that are counted beside the loss, which choice fell on whom: what came since the last call, as many
// on every rank and in every step. Called as a step begins, where the result is of something else and is
// dropped, and in finish().
using Tally = std::function<std::vector<double>()>;

struct StepOptions {
  double max_norm = 1.0;  // 0: no clipping
  // Ranks with fewer micro-batches than others run the forward on empty ones too, for terms whose forward
  // holds a collective (BalanceLoss).
  bool even_micro_batches = false;
  LookAhead look_ahead{};
  Tally tally{};  // added up over the ranks in the message of the norm: no collective of its own
  // Their squares travel in the same message; one pass more over the gradients.
  NormParts norm_parts{};
  // On a GPU, micro-batches are computed as CUDA graphs where nothing is exchanged in their backwards
  // (docs/gpu.md). Only for a forward that depends on the batch's tensors alone and gives terms of the same
  // names, weights and means for every batch: its code runs when a graph is recorded, not for each
  // micro-batch.
  bool capture = false;
  // One more collective a step: BrokenInvariant unless the ranks divide by the same numbers.
  bool check_denominators = debug_build();
  MicroBatchSchedule schedule = one_after_another;
  // Of a schedule of a pipeline's stages: how many this rank has, and of what the number of micro-batches is
  // made a multiple (with empty ones).
  std::size_t parts = 1, micro_batches_of = 1;
};

// The options of a step whose micro-batches go through a pipeline, which outlives it: schedule, parts and
// micro_batches_of.
StepOptions through(const Pipeline& pipeline, StepOptions others = {});

struct StepReport {
  double loss = 0;               // Σ numerators / Σ denominators over all ranks: what was differentiated
  std::vector<TermValue> terms;  // each term of the loss by itself; the same on all ranks
  Census census;                 // global counts
  std::vector<double> tally;     // of StepOptions::tally, over all ranks
  double norm = 0;               // of the whole gradient, before clipping
  std::vector<TermValue> part_norms{};  // of StepOptions::norm_parts, likewise
  double clip_coefficient = 1;          // what the gradient was multiplied by
  double gradient_scale = 1;            // a deferred mean's: views() hold the gradient divided by this
  bool finite = true;                   // false: nothing was updated, on any rank
  bool updated = false;                 // false as well when the step had no valid target
};

// One optimizer step: the heart of the project (src/train/step.cpp).

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
