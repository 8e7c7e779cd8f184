// One optimizer step. Its gradient is the one that a single device would compute on the whole batch.
#include "isograd/step.hpp"

#include <ATen/core/Tensor.h>

#include "isograd/error.hpp"

namespace isograd {

Step::Step(ForwardLossTerms forward, DataParallel& layout, Normalizer& mean, Optimizer& optimizer,
           StepOptions options)
    : forward_(std::move(forward)), layout_(layout), mean_(mean), optimizer_(optimizer), options_(options) {}

void Step::accumulate(const MicroBatches& micro_batches, bool stop_requested) {
  layout_.zero_gradients();
  local_loss_sum_ = 0;

  // (1) Count targets over all ranks, before any backward: one small collective.
  census_ = mean_.count(micro_batches, layout_.group(), stop_requested);
  denominator_ = mean_.denominator(census_);

  for (std::size_t i = 0; i < micro_batches.size(); ++i) {
    // (2) The one division: this micro-batch's share of the global loss.
    const at::Tensor share = mean_.scale(forward_(micro_batches[i]), denominator_);

    // (3) Backward adds the share's gradient; in the last one, buckets are reduced as they become complete.
    layout_.begin_backward(i + 1 == micro_batches.size());
    // A micro-batch without targets may give a constant zero, which has nothing to differentiate.
    if (share.requires_grad() || micro_batches[i].num_targets() > 0) share.backward();
    local_loss_sum_ += share.item<double>();
  }
  accumulated_ = true;
}

StepReport Step::finish() {
  if (!accumulated_)
    throw ConfigError(
        {.where = "Step::finish",
         .found = "no accumulate() before it",
         .expected = "accumulate() then finish()",
         .action = "Call accumulate() on every rank, with no micro-batches where there are none"});
  accumulated_ = false;

  // (4) Afterwards the gradients are those of one device, on every rank.
  layout_.finish_reduction();

  // (5) The exact norm, each element counted by its owner; the loss travels along.
  const GlobalNorm global = global_norm(layout_.buckets(), local_loss_sum_, layout_.group());

  StepReport report;
  report.loss = global.loss_sum;
  report.census = census_;
  report.norm = global.norm;

  // (6) Not finite on any rank, or no target anywhere: no weight moves, on no rank.
  report.finite = global.finite;
  if (!global.finite || denominator_.value == 0) return report;

  // (7) Clip and update in one fused pass.
  report.clip_coefficient = clip_coefficient(global.norm, options_.max_norm);
  optimizer_.update(layout_.buckets(), report.clip_coefficient);
  report.updated = true;

  // (8) The caller prints.
  return report;
}

StepReport Step::operator()(const MicroBatches& micro_batches, bool stop_requested) {
  accumulate(micro_batches, stop_requested);
  return finish();
}

}  // namespace isograd
