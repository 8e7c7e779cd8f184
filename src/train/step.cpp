// One optimizer step. Its gradient is the one that a single device would compute on the whole batch.
#include "isograd/step.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>

#include <algorithm>

#include "isograd/error.hpp"
#include "loss/ledger.hpp"

namespace isograd {

// Whether any rank of the group says so. Collective.
static bool any_rank(bool own, Group& group) {
  at::Tensor flag = at::full({1}, own ? 1 : 0, at::kLong);
  group.all_reduce(flag, ReduceOp::kMax);
  return flag.item<std::int64_t>() != 0;
}

Step::Step(ForwardLossTerms forward, DataParallel& layout, Normalizer& mean, Optimizer& optimizer,
           StepOptions options)
    : forward_(std::move(forward)),
      layout_(layout),
      mean_(mean),
      optimizer_(optimizer),
      options_(options),
      ledger_(std::make_unique<TermLedger>()) {}
Step::~Step() = default;

void Step::accumulate(const MicroBatches& micro_batches, bool stop_requested) {
  if (!(accumulated_ && mean_.deferred())) {  // a deferred step goes on until finish()
    layout_.zero_gradients();
    ledger_->clear();
    mean_.begin_step();
  }

  // (1) Count over the ranks that see different data, before any backward: one small collective, two if
  // samples are cut over ranks.
  const Mesh& mesh = layout_.mesh();
  Group counting = mesh.counting(), all = mesh.all();
  census_ = mean_.count(micro_batches, counting, stop_requested);
  if (all.size() > counting.size()) census_.stop_requested = any_rank(census_.stop_requested, all);
  denominator_ = mean_.denominator(census_);
  if (options_.check_denominators) check_agreement(denominator_, all);

  MicroBatches batches = micro_batches;
  if (options_.even_micro_batches || layout_.takes_every_round())
    batches.resize(std::max(batches.size(), static_cast<std::size_t>(census_.call_rounds)), empty_batch());
  for (std::size_t i = 0; i < batches.size(); ++i) {
    // (2) The one division: this micro-batch's share of the global loss.
    const LossTerms terms = forward_(mean_.prepare(batches[i], denominator_));
    const at::Tensor share = mean_.scale(terms, denominator_);

    // (3) Backward adds the share's gradient; in the last one, buckets are reduced as they become complete.
    layout_.begin_backward(i + 1 == batches.size() && !mean_.deferred());
    // A micro-batch without targets may give a constant zero, which has nothing to differentiate.
    if (share.requires_grad() || batches[i].num_targets() > 0) share.backward();
    ledger_->add(terms, share.item<double>(), denominator_, census_);
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

  // (4) Afterwards the gradients are those of one device, on every rank; a deferred mean's once multiplied by
  // gradient_scale.
  double squares = 0;  // of the elements that this rank owns
  layout_.finish_reduction_with([&](const Bucket& bucket, std::optional<double> taken) {
    squares += taken ? *taken : owned_squares(bucket);
  });
  const double scale = denominator_.gradient_scale;

  // (5) The exact norm, each element counted by its owner; the loss and its terms travel along.
  std::vector<double> sums = ledger_->message(census_);
  if (!layout_.mesh().speaks()) std::fill(sums.begin(), sums.end(), 0.0);  // another rank has the same ones
  const GlobalNorm global = global_norm(squares, sums, layout_.mesh().all());

  StepReport report;
  report.loss = global.loss_sum * scale;
  report.terms = TermLedger::read(sums);
  for (TermValue& term : report.terms) term.value *= scale;
  report.census = census_;
  report.norm = global.norm * scale;
  report.gradient_scale = scale;

  // (6) Not finite on any rank, or no target anywhere: no weight moves, on no rank.
  report.finite = global.finite;
  if (!global.finite || denominator_.value == 0) return report;

  // (7) Clip and update in one fused pass.
  report.clip_coefficient = clip_coefficient(report.norm, options_.max_norm);
  optimizer_.update(layout_.buckets(), report.clip_coefficient * scale);
  layout_.publish_parameters();
  report.updated = true;

  // (8) The caller prints.
  return report;
}

StepReport Step::operator()(const MicroBatches& micro_batches, bool stop_requested) {
  accumulate(micro_batches, stop_requested);
  return finish();
}

}  // namespace isograd
