// One optimizer step. Its gradient is the one that a single device would compute on the whole batch.
#include "isograd/step.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <optional>

#include "base/refuse.hpp"
#include "isograd/fully_shard.hpp"
#include "isograd/pipeline_parallel.hpp"
#include "layout/flat.hpp"
#include "loss/normalizer.hpp"
#include "loss/term_graph.hpp"
#include "parallel/pipeline/split_backward.hpp"
#include "train/captured.hpp"
#include "train/evaluate.hpp"
#include "train/rank_zero.hpp"

namespace isograd {
namespace {

// The sums over the ranks of a step that travel in the message of its norm.
struct StepMessage {
  double loss = 0;
  double local_means = 0;  // ranks that have found a mean of a micro-batch
  double other_names = 0;  // ranks whose terms have other names than were agreed
  std::vector<double> terms = std::vector<double>(TermSums::kMostTerms);
  std::vector<double> counters{};      // StepOptions::counters
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

// How many micro-batches there are, and a checksum of all that is in them, in order.
std::vector<std::int64_t> described(const MicroBatches& micro_batches) {
  std::vector<at::Tensor> tensors;
  for (const Batch& batch : micro_batches) {
    tensors.push_back(at::tensor(batch.cu_seqlens, at::kLong));
    tensors.push_back(at::tensor(batch.sample_ids, at::kLong));
    for (const at::Tensor& each : {batch.tokens, batch.targets, batch.positions, batch.weights})
      if (each.defined()) tensors.push_back(each);
    tensors.insert(tensors.end(), batch.inputs.begin(), batch.inputs.end());
  }
  const at::Tensor sums = checksums(tensors);  // on the CPU
  std::uint64_t sum = 0;
  for (std::int64_t i = 0; i < sums.numel(); ++i)  // the product makes the order count
    sum = sum * 0x100000001b3 + static_cast<std::uint64_t>(sums.const_data_ptr<std::int64_t>()[i]);
  return {static_cast<std::int64_t>(micro_batches.size()), static_cast<std::int64_t>(sum)};
}

// Joins the requests of ranks with the same data. ConfigError where micro-batches differ: each rank would
// compute its part of another loss. Collective over these ranks.
Requests agree_with_peers(const MicroBatches& micro_batches, Requests requests, const Mesh& mesh) {
  Group peers = mesh.along(mesh.grid().complement(mesh.data()));
  if (peers.size() == 1) return requests;
  std::vector<std::int64_t> numbers = described(micro_batches);
  numbers.insert(numbers.end(), {requests.stop ? 1 : 0, requests.save ? 1 : 0});
  const at::Tensor all = peers.all_gather(at::tensor(numbers, at::kLong));  // [peers, 4]
  for (int rank = 1; rank < peers.size(); ++rank) {
    const bool same_number = all[rank][0].equal(all[0][0]);
    if (same_number && all[rank][1].equal(all[0][1])) continue;
    refuse("the batches of ranks that compute one loss together",
           same_number
               ? fmt::format("other micro-batches on rank {} than on rank 0 of {}", rank, peers.name())
               : fmt::format("{} micro-batches on rank {}, {} on rank 0 of {}",
                             all[rank][0].item<std::int64_t>(), rank, all[0][0].item<std::int64_t>(),
                             peers.name()),
           "the same on all of these ranks",
           "Assign samples by Mesh::place() along Mesh::data(), not by the rank in the world");
  }
  const auto any = [&](int column) { return all.select(1, column).max().item<std::int64_t>() != 0; };
  return {any(2), any(3)};
}

[[noreturn]] void refuse_schedule(std::string found, std::string expected) {
  refuse("StepOptions::schedule", std::move(found), std::move(expected),
         "Fix the schedule; one_after_another() is a correct example");
}

[[noreturn]] void refuse_halves(std::string of, std::string expected) {
  refuse("a half of a backward", std::move(of), std::move(expected),
         "Take a schedule of whole backwards, 1f1b for instance, or zero2 in place of zero3");
}

}  // namespace

// A rank's micro-batches: a step and an evaluation count, prepare, compute and divide by the same lines.
class StepWork : public MicroBatchWork {
 public:
  // Keeps references: all arguments outlive it. `parts`, `micro_batches_of`: as StepOptions has them.
  StepWork(const ForwardLossTerms& forward, DataParallel& layout, Normalizer& mean, std::size_t parts = 1,
           std::size_t micro_batches_of = 1, bool capture = false);

  void clear() { sums_.clear(), readings_.clear(); }  // before the first micro-batches of a step
  // Collective. `even`: ranks with fewer than others get empty ones too.
  void count(MicroBatches micro_batches, Requests requests, bool even);
  const MicroBatches& micro_batches() const { return batches_; }
  const StepCounts& step_counts() const { return step_counts_; }
  const Denominator& denominator() const { return denominator_; }
  const LocalMeans& local_means() const { return local_means_; }  // of all steps so far
  // Waits for the device, once, for all that was left in readings().
  const TermSums& sums() {
    readings_.read();
    return sums_;
  }
  Readings& readings() { return readings_; }
  TermNames& names() { return names_; }  // agreed in an earlier step

  std::size_t size() const override { return batches_.size(); }
  // With the one division: the share of the global loss.
  void forward(std::size_t i, std::size_t part = 0) override;
  void backward(std::size_t i, bool last, std::size_t part = 0) override;
  void backward_inputs(std::size_t i, std::size_t part = 0) override;
  void backward_weights(std::size_t i, bool last, std::size_t part = 0) override;

  // ConfigError where the schedule leaves something out or takes it in an impossible order.
  void run(const MicroBatchSchedule& schedule);
  void look();  // each forward, logged, and no backward

 private:
  struct PendingLoss {  // of the global loss, between a forward and its backward
    LossTerms terms{};
    at::Tensor value{};
    std::optional<WeightsBackward> weights{};  // between the halves of a backward
    bool captured = false;                     // forward and backward are one, in backward()
  };
  PendingLoss& pending_loss(std::size_t i, std::size_t part) { return shares_.at(part * size() + i); }
  // False: a constant of a micro-batch without targets. ConfigError: targets that train nothing.
  static bool is_differentiable(const at::Tensor& share, const Batch& batch);
  void compute(std::size_t i, PendingLoss& share);
  void begin_gradients(std::size_t i, bool last);
  void log(PendingLoss& share);
  void check(bool holds, std::size_t i, const char* expected) const;  // the rules of a schedule

  const ForwardLossTerms& forward_;
  DataParallel& layout_;
  Normalizer& mean_;
  MicroBatches batches_{};
  std::size_t parts_, micro_batches_of_;
  std::vector<PendingLoss> shares_{};  // by part and micro-batch
  std::size_t left_ = 0;               // backwards to come
  StepCounts step_counts_{};
  Denominator denominator_{};
  std::unique_ptr<CapturedWork> captured_{};  // null: nothing is
  Readings readings_{};
  TermSums sums_{};
  TermNames names_{};
  LocalMeans local_means_{};
};

StepWork::StepWork(const ForwardLossTerms& forward, DataParallel& layout, Normalizer& mean, std::size_t parts,
                   std::size_t micro_batches_of, bool capture)
    : forward_(forward), layout_(layout), mean_(mean), parts_(parts), micro_batches_of_(micro_batches_of) {
  if (capture && parts == 1 && !mean.deferred()) captured_ = CapturedWork::make(layout);
}

// (1) Count over the ranks that see different data, before any backward: one small collective, two if samples
// are cut over ranks; one more where other ranks hold the same data, so that any of them can stop all.
void StepWork::count(MicroBatches micro_batches, Requests requests, bool even) {
  batches_ = std::move(micro_batches);
  Group counting = layout_.mesh().counting();
  step_counts_ = mean_.count(batches_, counting, requests);
  requests = {step_counts_.stop_requested, step_counts_.save_requested};
  requests = agree_with_peers(batches_, requests, layout_.mesh());
  step_counts_.stop_requested = requests.stop, step_counts_.save_requested = requests.save;
  denominator_ = mean_.denominator(step_counts_);
  if (even || layout_.needs_even_micro_batches())
    batches_.resize(std::max(batches_.size(), static_cast<std::size_t>(step_counts_.call_micro_batches)),
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
  share.value = mean_.scale(share.terms, denominator_);  // refuses terms that are no scalars
  if (at::GradMode::is_enabled()) local_means_.look(share.terms, batch, mean_);
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

void StepWork::backward_inputs(std::size_t i, std::size_t part) {
  if (!layout_.splits_backward())
    refuse_halves("parameters of ZeRO-3, whose units gather them for both halves at once",
                  "parameters that are whole between a step's forwards and backwards");
  PendingLoss& own = pending_loss(i, part);
  if (own.captured) compute(i, own);
  check(own.value.defined() && !own.weights, i, "forward(i) before backward_inputs(i), each once");
  own.weights.emplace();
  if (is_differentiable(own.value, batches_[i])) own.weights = backward_of_inputs(own.value);
}

void StepWork::backward_weights(std::size_t i, bool last, std::size_t part) {
  PendingLoss& own = pending_loss(i, part);
  check(own.weights.has_value(), i, "backward_inputs(i) before backward_weights(i), each once");
  begin_gradients(i, last);
  own.weights->run();
  log(own);
}

void StepWork::log(PendingLoss& kept) {
  const PendingLoss share = std::exchange(kept, {});
  sums_.add(share.terms, share.value, denominator_, step_counts_, readings_);
}

// ---- the order of micro-batches, and the rules of any such order ----

void StepWork::run(const MicroBatchSchedule& schedule) {
  shares_ = std::vector<PendingLoss>(size() * parts_), left_ = size() * parts_;
  try {
    schedule(*this);
    if (left_ > 0)
      refuse_schedule(
          fmt::format("{} of {} backwards{}", shares_.size() - left_, shares_.size(),
                      parts_ > 1 ? fmt::format(" ({} micro-batches in {} parts)", size(), parts_) : ""),
          "a forward and a backward of each micro-batch");
  } catch (...) {
    shares_.clear();  // and with them what the forwards kept
    throw;
  }
}

void StepWork::check(bool holds, std::size_t i, const char* expected) const {
  if (!holds)
    refuse_schedule(
        fmt::format("micro-batch {} (they are numbered 0 to {})", i, static_cast<std::int64_t>(size()) - 1),
        expected);
}

void MicroBatchWork::backward_inputs(std::size_t, std::size_t) {
  refuse_halves("work that computes backwards whole", "backward()");
}
void MicroBatchWork::backward_weights(std::size_t, bool, std::size_t) {
  refuse_halves("work that computes backwards whole", "backward()");
}

void one_after_another(MicroBatchWork& work) {
  for (std::size_t i = 0; i < work.size(); ++i) {
    work.forward(i);
    work.backward(i, i + 1 == work.size());
  }
}

StepOptions through(const Pipeline& pipeline, StepOptions others) {
  others.schedule = [&pipeline](MicroBatchWork& work) {
    pipeline.run(
        work.size(),
        {.forward = [&](std::size_t i, std::size_t part) { work.forward(i, part); },
         .backward = [&](std::size_t i, bool last, std::size_t part) { work.backward(i, last, part); },
         .inputs = [&](std::size_t i, std::size_t part) { work.backward_inputs(i, part); },
         .weights = [&](std::size_t i, bool last,
                        std::size_t part) { work.backward_weights(i, last, part); }});
  };
  others.parts = pipeline.own_stages().size();
  others.micro_batches_of = pipeline.micro_batches_of();
  return others;
}

// ---- an evaluation ----

// A rank with several stages must choose one outside of a step (Pipeline::stage()).
void StepWork::look() {
  shares_ = std::vector<PendingLoss>(size());
  for (std::size_t i = 0; i < size(); ++i) {
    forward(i);
    log(pending_loss(i, 0));
  }
}

Evaluation evaluate(const ForwardLossTerms& forward, Normalizer& mean, DataParallel& layout,
                    MicroBatches micro_batches) {
  Normalizer& known = mean.undeferred();  // a step that is under way goes on as it was
  StepWork work(forward, layout, known);
  work.count(std::move(micro_batches), /*requests=*/{}, /*even=*/false);
  Evaluation result{.targets = work.step_counts().targets};
  if (result.targets == 0) return result;
  const at::NoGradGuard no_grad;
  work.look();
  const Mesh& mesh = layout.mesh();
  const double own = mesh.contributes() ? work.sums().loss() : 0;  // else another rank has the same loss
  at::Tensor loss = at::full({1}, own, at::kDouble);
  mesh.all().all_reduce(loss);
  result.loss = loss.item<double>();
  return result;
}

// ---- the step ----

ForwardLossTerms one_term(ForwardSum forward, const std::string& name) {
  return [forward = std::move(forward), name](const Batch& batch) -> LossTerms {
    return {{name, forward(batch)}};
  };
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

void Step::accumulate(const MicroBatches& micro_batches, Requests requests) {
  if (!(accumulated_ && mean_.deferred())) {  // a deferred step goes on until finish()
    layout_.zero_gradients();
    work_->clear();
    mean_.begin_step();
    if (options_.counters) options_.counters();
  }
  work_->count(micro_batches, requests, options_.even_micro_batches);
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
  // A GPU is waited for here and nowhere else in a step, after it has been given the update.
  const at::Tensor on_device = squares.complete(work_->readings());
  for (OwnedSquares& part : part_squares) part.complete(work_->readings());
  const bool ahead = !empty && update_ahead(on_device, scale);
  const TermSums& own = work_->sums();
  const std::optional<ErrorText> local_mean = work_->local_means().found();
  ISOGRAD_INVARIANT(!(ahead && local_mean), "an update before a refusal of the step");
  StepMessage message;
  if (options_.counters) message.counters = options_.counters();
  if (layout_.mesh().contributes()) {  // else another rank has the same loss
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
  report.step_counts = work_->step_counts();
  report.loss = without_sign(message.loss * scale);
  if (report.step_counts.global_micro_batches > 0)
    for (std::size_t i = 0; i < work_->names().names().size(); ++i)
      report.terms.push_back({work_->names().names()[i], without_sign(message.terms[i] * scale)});
  report.counters = message.counters;
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
  ahead ? optimizer_.count_update(layout_.buckets())
        : optimizer_.update(layout_.buckets(), report.clip_coefficient * scale);
  layout_.publish_parameters();
  report.updated = true;

  // (8) The caller prints.
  return report;
}

// Updates on one GPU before the host knows its norm: clip and finiteness are decided there, with the same
// bits. False: nothing was done.
bool Step::update_ahead(const at::Tensor& squares, double scale) {
  const at::NoGradGuard no_grad;
  const at::Tensor loss_is_finite = work_->readings().loss_is_finite();
  if (!squares.defined() || !loss_is_finite.defined() || layout_.mesh().all().size() > 1 ||
      work_->local_means().found())
    return false;
  work_->readings().start();
  const at::Tensor norm = squares.sqrt() * scale;
  const at::Tensor clip = options_.max_norm > 0
                              ? at::full_like(norm, options_.max_norm).div(norm + 1e-6).clamp_max(1.0)
                              : at::ones_like(norm);
  const at::Tensor stop = squares.isfinite().logical_and(loss_is_finite).logical_not().to(at::kFloat);
  return optimizer_.update_unless(layout_.buckets(), stop, clip * scale);
}

StepReport Step::operator()(const MicroBatches& micro_batches, Requests requests) {
  accumulate(micro_batches, requests);
  return finish();
}

}  // namespace isograd
