// For people who keep their own training loop: the pieces of the step that have to be right.
#pragma once

#include "isograd/cxx20.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "isograd/normalizer.hpp"

namespace isograd {

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

}  // namespace isograd
