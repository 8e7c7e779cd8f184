// The token mean: counts over the whole step, then the one division.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include "isograd/error.hpp"
#include "isograd/loss.hpp"

namespace isograd {
namespace {

// What each rank writes into its slot of the counting vector.
enum Slot : std::int64_t { kTargets, kTokens, kMicroBatches, kStop, kSlotWidth };

}  // namespace

Census TokenMean::count(const MicroBatches& micro_batches, Group& data, bool stop_requested) {
  at::Tensor counts = at::zeros({data.size(), kSlotWidth}, at::kLong);  // [W, kSlotWidth]
  auto by_rank = counts.accessor<std::int64_t, 2>();
  auto mine = by_rank[data.rank()];
  for (const Batch& batch : micro_batches) {
    mine[kTargets] += batch.num_targets();
    mine[kTokens] += batch.num_tokens();
  }
  mine[kMicroBatches] = static_cast<std::int64_t>(micro_batches.size());
  mine[kStop] = stop_requested ? 1 : 0;
  if (data.size() > 1) data.all_reduce(counts);

  Census census;
  for (int rank = 0; rank < data.size(); ++rank) {
    const auto slot = by_rank[rank];
    census.targets += slot[kTargets];
    census.tokens += slot[kTokens];
    census.micro_batches += slot[kMicroBatches];
    census.stop_requested |= slot[kStop] != 0;
    census.targets_by_rank.push_back(slot[kTargets]);
  }
  return census;
}

Denominator TokenMean::denominator(const Census& census) const {
  return {.of = "targets", .over = "data", .value = static_cast<double>(census.targets)};
}

at::Tensor TokenMean::scale(const LossTerms& terms, const Denominator& denominator) const {
  if (terms.empty())
    throw ConfigError({.where = "forward",
                       .found = "no loss term",
                       .expected = "one sum or more for each micro-batch, 0 for an empty one",
                       .action = "Return the loss terms from the forward function"});
  for (const LossTerm& term : terms)
    if (!term.sum.defined() || term.sum.numel() != 1)
      throw ConfigError({.where = fmt::format("loss term '{}'", term.name),
                         .found = term.sum.defined() ? fmt::format("shape {}", c10::str(term.sum.sizes()))
                                                     : "an undefined tensor",
                         .expected = "a scalar: the sum over the micro-batch's tokens",
                         .action = "Sum the per-token losses; do not take their mean"});
  // An empty step: a zero that hangs on nothing, so that a NaN of the model cannot reach a gradient as NaN ·
  // 0.
  if (denominator.value == 0)
    return at::zeros({}, terms.front().sum.options().dtype(at::kDouble)).requires_grad_(true);
  at::Tensor numerator;
  for (const LossTerm& term : terms) {
    const at::Tensor sum = term.sum.reshape({}).to(at::kDouble);
    numerator = numerator.defined() ? numerator + sum : sum;
  }
  return numerator / denominator.value;
}

}  // namespace isograd
