// One optimizer step. Its gradient is the one that a single device would compute on the whole batch.
#include "isograd/step.hpp"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <optional>

#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "train/peers.hpp"
#include "train/rank_zero.hpp"
#include "train/step_work.hpp"

namespace isograd {
namespace {

// What the ranks of a step add up in the message of its norm.
struct StepMessage {
  double loss = 0;
  double local_means = 0;  // ranks that have found a mean of a micro-batch
  double other_names = 0;  // ranks whose terms have other names than were agreed
  std::vector<double> terms = std::vector<double>(TermSums::kMostTerms);
  std::vector<double> counters{};      // StepOptions::tally
  std::vector<double> part_squares{};  // StepOptions::norm_parts

  std::vector<double> pack() const {
    std::vector<double> numbers = {loss, local_means, other_names};
    for (const auto* more : {&terms, &counters, &part_squares})
      numbers.insert(numbers.end(), more->begin(), more->end());
    return numbers;
  }
  void unpack(const std::vector<double>& numbers) {
    auto next = numbers.begin();
    for (double* number : {&loss, &local_means, &other_names}) *number = *next++;
    for (auto* more : {&terms, &counters, &part_squares})
      for (double& number : *more) number = *next++;
  }
};

}  // namespace

StepWork::StepWork(const ForwardLossTerms& forward, DataParallel& layout, Normalizer& mean, std::size_t parts,
                   std::size_t micro_batches_of, bool capture)
    : forward_(forward), layout_(layout), mean_(mean), parts_(parts), micro_batches_of_(micro_batches_of) {
  if (capture && parts == 1 && !mean.deferred()) captured_ = CapturedWork::make(layout);
}

// (1) Count over the ranks that see different data, before any backward: one small collective, two if samples
// are cut over ranks; one more where other ranks hold the same data, so that any of them can stop all.
void StepWork::count(MicroBatches micro_batches, bool stop_requested, bool even) {
  batches_ = std::move(micro_batches);
  Group counting = layout_.mesh().counting();
  census_ = mean_.count(batches_, counting, stop_requested);
  census_.stop_requested = agree_with_peers(batches_, census_.stop_requested, layout_.mesh());
  denominator_ = mean_.denominator(census_);
  if (even || layout_.needs_even_micro_batches())
    batches_.resize(std::max(batches_.size(), static_cast<std::size_t>(census_.call_micro_batches)),
                    empty_batch());
  while (batches_.size() % micro_batches_of_ != 0) batches_.push_back(empty_batch());
}

// (2) The one division: this micro-batch's share of the global loss.
void StepWork::forward(std::size_t i, std::size_t part) {
  PendingLoss& share = pending_loss(i, part);
  share.captured = captured_ && at::GradMode::is_enabled();
  if (!share.captured) compute(i, share);
}

void StepWork::compute(std::size_t i, PendingLoss& share) {
  share.captured = false;
  const Batch batch = mean_.prepare(batches_[i], denominator_);
  share.terms = forward_(batch);
  if (at::GradMode::is_enabled()) local_means_.look(share.terms, batch, mean_);
  share.value = mean_.scale(share.terms, denominator_);
}

bool StepWork::is_differentiable(const at::Tensor& share, const Batch& batch) {
  if (share.requires_grad() || batch.num_targets() == 0) return share.requires_grad();
  refuse(
      "forward",
      fmt::format("a loss over {} targets that depends on no parameter with requires_grad",
                  batch.num_targets()),
      "one that depends on a trained parameter",
      "Unfreeze a parameter (requires_grad_(true)), or look for a detach() or NoGradGuard between the parameters and the loss");
}

// (3) Backward adds the share's gradient; in the last one, buckets are reduced as they become complete.
void StepWork::backward(std::size_t i, bool last, std::size_t part) {
  PendingLoss& own = pending_loss(i, part);
  check((own.value.defined() || own.captured) && !own.weights, i, "forward(i) before backward(i), each once");
  begin_gradients(i, last);
  if (own.captured) {
    const Batch batch = mean_.prepare(batches_[i], denominator_);
    const auto look = [&](const LossTerms& terms) { local_means_.look(terms, batch, mean_); };
    if (auto share = captured_->run(batch, forward_, denominator_, look)) {
      own.terms = std::move(share->terms), own.value = std::move(share->value);
      return log(own);
    }
    compute(i, own);
  }
  // A micro-batch without targets may give a constant zero, which has nothing to differentiate.
  const at::Tensor& share = own.value;
  if (is_differentiable(share, batches_[i])) share.backward();
  log(own);
}

void StepWork::begin_gradients(std::size_t i, bool last) {
  check(last == (--left_ == 0), i, "`last` with the last backward, and no other");
  layout_.begin_backward(last && !mean_.deferred());
}

void StepWork::log(PendingLoss& kept) {
  const PendingLoss share = std::exchange(kept, {});
  sums_.add(share.terms, share.value, denominator_, census_, readings_);
}

Step::Step(ForwardLossTerms forward, DataParallel& layout, Normalizer& mean, Optimizer& optimizer,
           StepOptions options)
    : forward_(std::move(forward)),
      layout_(layout),
      mean_(mean),
      optimizer_(optimizer),
      options_(std::move(options)),
      work_(std::make_unique<StepWork>(forward_, layout, mean, options_.parts, options_.micro_batches_of,
                                       options_.capture)) {
  clip_coefficient(1, options_.max_norm);  // refuses a limit that is no number before the first step
}
Step::~Step() = default;

void Step::accumulate(const MicroBatches& micro_batches, bool stop_requested) {
  if (!(accumulated_ && mean_.deferred())) {  // a deferred step goes on until finish()
    layout_.zero_gradients();
    work_->clear();
    mean_.begin_step();
    if (options_.tally) options_.tally();
  }
  work_->count(micro_batches, stop_requested, options_.even_micro_batches);
  Group all = layout_.mesh().all();
  if (options_.check_denominators) check_agreement(work_->denominator(), all);
  if (options_.look_ahead) {
    const Recomputing mark;  // the forward of each micro-batch is the one that counts
    options_.look_ahead(work_->micro_batches(), layout_.mesh().counting());
  }
  work_->run(options_.schedule);  // forward(i) and backward(i, last) of each micro-batch
  accumulated_ = true;
}

StepReport Step::finish() {
  if (!accumulated_)
    refuse("Step::finish", "no accumulate() before it", "accumulate() then finish()",
           "Call accumulate() on every rank, with no micro-batches where there are none");
  accumulated_ = false;

  // (4) Afterwards the gradients are those of one device, on every rank; a deferred mean's once multiplied by
  // gradient_scale.
  OwnedSquares squares;
  std::vector<OwnedSquares> part_squares(options_.norm_parts.names.size());
  layout_.finish_reduction_with([&](const Bucket& bucket, std::optional<double> taken) {
    taken ? squares.add(*taken) : squares.add(bucket);
    if (!part_squares.empty()) add_owned_squares(bucket, options_.norm_parts, part_squares);
  });
  // Without a target the loss and its gradient are 0, whatever terms of other means (a balance loss) give.
  const bool empty = work_->denominator().is_empty();
  const double scale = empty ? 0 : work_->denominator().gradient_scale;

  // (5) The exact norm, each element counted by its owner; the loss, its terms and the counters travel along.
  // A GPU is waited for here and nowhere else in a step.
  squares.complete(work_->readings());
  for (OwnedSquares& part : part_squares) part.complete(work_->readings());
  const TermSums& own = work_->sums();
  const std::optional<ErrorText> local_mean = work_->local_means().found();
  StepMessage message;
  if (options_.tally) message.counters = options_.tally();
  if (layout_.mesh().speaks()) {  // else another rank has the same loss
    message.loss = own.loss();
    std::ranges::transform(own.terms(), message.terms.begin(), &TermValue::value);
  } else {
    std::ranges::fill(message.counters, 0.0);
  }
  message.local_means = local_mean ? 1 : 0;
  message.other_names = work_->names().differ_from(own.terms()) ? 1 : 0;
  std::ranges::transform(part_squares, std::back_inserter(message.part_squares), &OwnedSquares::value);
  std::vector<double> sums = message.pack();
  Group all = layout_.mesh().all();
  const GlobalNorm global = global_norm(squares.value(), sums, all);
  message.unpack(sums);
  if (message.local_means > 0) throw_agreed(all, local_mean);  // before any weight moves, on all ranks
  if (message.other_names > 0) work_->names().agree(own.terms(), all);

  // A NaN that 0 / 0 makes has a sign on x86, which texts would show as "-nan".
  const auto without_sign = [](double value) { return std::isnan(value) ? std::fabs(value) : value; };
  StepReport report;
  report.census = work_->census();
  report.loss = without_sign(message.loss * scale);
  if (report.census.global_micro_batches > 0)
    for (std::size_t i = 0; i < work_->names().names().size(); ++i)
      report.terms.push_back({work_->names().names()[i], without_sign(message.terms[i] * scale)});
  report.tally = message.counters;
  report.norm = without_sign(global.norm * scale);
  for (std::size_t i = 0; i < part_squares.size(); ++i)
    report.part_norms.push_back(
        {options_.norm_parts.names[i], without_sign(std::sqrt(message.part_squares[i]) * scale)});
  report.gradient_scale = scale;

  // (6) Not finite on any rank, or no target anywhere: no weight moves, on no rank.
  report.finite = global.finite;
  if (!global.finite || empty) return report;

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
