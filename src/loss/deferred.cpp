// Means whose denominator is known only when the step ends.
#include <fmt/format.h>

#include <algorithm>

#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "isograd/loss.hpp"
#include "loss/share.hpp"

namespace isograd {
namespace {

template <typename Number>
void add(std::vector<Number>& sums, const std::vector<Number>& more) {
  sums.resize(std::max(sums.size(), more.size()));
  for (std::size_t i = 0; i < more.size(); ++i) sums[i] += more[i];
}

void add(StepCounts& total, const StepCounts& call) {
  total.targets += call.targets;
  total.tokens += call.tokens;
  total.micro_batches += call.micro_batches;
  total.stop_requested |= call.stop_requested;
  add(total.targets_by_rank, call.targets_by_rank);
  total.rank = call.rank;
  total.global_micro_batches += call.global_micro_batches;
  total.call_micro_batches = call.call_micro_batches;
  total.weights += call.weights;
  total.samples += call.samples;
  total.silent += call.silent;
  total.cut += call.cut;
  add(total.weights_by_rank, call.weights_by_rank);
  add(total.samples_by_rank, call.samples_by_rank);
  add(total.micro_batches_by_rank, call.micro_batches_by_rank);
  total.sample_sizes = call.sample_sizes;  // those of earlier calls have been used
}

const Normalizer& checked(const std::unique_ptr<Normalizer>& of) {
  if (!of || of->deferred() || of->options().replicas > 1)
    refuse("Deferred",
           !of              ? "no mean"
           : of->deferred() ? "a mean that is deferred already"
                            : "a mean of per-replica means",
           "a mean over all ranks: one denominator, known when the step ends",
           "Defer a TokenMean, SampleMean, WeightedMean, FixedDenominator or NoDenominator");
  return *of;
}

}  // namespace

Deferred::Deferred(std::unique_ptr<Normalizer> of)
    : Normalizer(checked(of).mean(), of->options()), of_(std::move(of)) {}

void Deferred::begin_step() {
  total_ = {};
  samples_.clear();
}

StepCounts Deferred::count(const MicroBatches& micro_batches, Group& data, bool stop_requested) {
  add(total_, of_->count(micro_batches, data, stop_requested, samples_));
  if (mean() == Mean::kSamples)
    for (const Batch& batch : micro_batches)
      samples_.insert(batch.sample_ids.begin(), batch.sample_ids.end());
  return total_;
}

Denominator Deferred::denominator(const StepCounts& step_counts) const {
  Denominator result = of_->denominator(step_counts);
  // Calls that have counted nothing are differentiated like all others: only the end of the step knows.
  result.gradient_scale = result.value == 0 ? 0 : 1 / result.value;
  result.value = 1;
  return result;
}

at::Tensor Deferred::scale(const LossTerms& terms, const Denominator& denominator) const {
  LossTerms raw = terms;
  for (LossTerm& term : raw) {
    if (term.of_whole_step)
      refuse(
          fmt::format("loss term '{}'", term.name),
          "a deferred mean, whose calls each know their own part of the step",
          "a mean of batches that are known before the step's first forward: the term is made of numbers that are collected over the whole step",
          "Take the mean without Deferred, or leave the term out");
    if (term.mean != Mean::kStep && (term.mean != mean() || term.mean == Mean::kFixed))
      refuse(fmt::format("loss term '{}'", term.name),
             fmt::format("{} in a gradient buffer that is divided by {} at the end of the step",
                         name_of(term.mean), denominator.of),
             "one denominator for each deferred gradient buffer",
             "Give the term the step's mean, or accumulate it in a buffer of its own");
    term.mean = Mean::kStep;
  }
  check_terms(raw, /*deferred=*/true);
  return share_of(raw, denominator);
}

DeferredAccumulator::DeferredAccumulator(std::unique_ptr<Normalizer> mean, Group data)
    : mean_(std::move(mean)), data_(std::move(data)) {}

MicroBatches DeferredAccumulator::begin_call(const MicroBatches& micro_batches) {
  step_counts_ = mean_.count(micro_batches, data_, false);
  denominator_ = mean_.denominator(step_counts_);
  MicroBatches prepared;
  for (const Batch& batch : micro_batches) prepared.push_back(mean_.prepare(batch, denominator_));
  return prepared;
}

at::Tensor DeferredAccumulator::raw_loss(const LossTerms& terms) {
  at::Tensor raw = mean_.scale(terms, denominator_);
  if (!raw.requires_grad()) raw.requires_grad_(true);  // of constants: a call may hold no target
  sum_ += raw.item<double>();
  return raw;
}

DeferredAccumulator::Result DeferredAccumulator::finish() {
  at::Tensor sum = at::full({1}, sum_, at::kDouble);
  if (data_.size() > 1) data_.all_reduce(sum);
  Result result{.gradient_scale = denominator_.is_empty() ? 0 : denominator_.gradient_scale,
                .step_counts = step_counts_};
  result.loss = sum.item<double>() * result.gradient_scale;
  sum_ = 0;
  step_counts_ = {};
  denominator_ = {};
  mean_.begin_step();
  return result;
}

}  // namespace isograd
