// The one division, at once or when the step ends.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <typeinfo>
#include <unordered_set>

#include "base/refuse.hpp"
#include "isograd/loss.hpp"
#include "loss/counting.hpp"
#include "loss/share.hpp"
#include "loss/term_graph.hpp"

namespace isograd {
namespace {

// Σ over terms of factor · sum. A node of its own, so that is_share() knows it wherever it turns up again.
struct Share : torch::autograd::Function<Share> {
  // `on_device`: the factors as data, of which none is 0. `value`: what the forward gives, where that is
  // known.
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, at::TensorList sums,
                            const std::vector<double>& factors, const std::optional<at::Tensor>& on_device,
                            std::optional<double> value) {
    at::Tensor share;
    torch::autograd::variable_list kept(sums.begin(), sums.end());
    if (value) share = at::full({}, *value, kept[0].options());
    for (std::size_t i = 0; i < kept.size() && !value; ++i) {
      at::Tensor part = kept[i].reshape({}).to(at::kDouble);
      if (on_device)
        part = part * on_device->select(0, static_cast<std::int64_t>(i));
      else
        part = factors[i] == 0 ? at::zeros_like(part) : part * factors[i];
      share = share.defined() ? share + part : part;
    }
    if (on_device) kept.push_back(*on_device);
    ctx->save_for_backward(kept);  // for their shapes and types
    ctx->saved_data["factors"] = factors;
    return share;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list upstream) {
    torch::autograd::variable_list gradients;
    const auto factors = ctx->saved_data["factors"].toDoubleVector();
    auto sums = ctx->get_saved_variables();
    at::Tensor on_device;
    if (factors.empty()) on_device = sums.back(), sums.pop_back();
    // A factor of 0, where nothing is counted (in a replica, in a micro-batch): no gradient, for a zero could
    // meet a NaN, or become 0 / 0 in a mean over nothing. Backward still visits every node below, so that
    // those that exchange something with other ranks do.
    for (std::size_t i = 0; i < sums.size(); ++i)
      if (on_device.defined())
        gradients.push_back((upstream[0] * on_device.select(0, static_cast<std::int64_t>(i)))
                                .to(sums[i].options())
                                .expand_as(sums[i]));
      else
        gradients.push_back(factors[i] == 0
                                ? at::Tensor()
                                : (upstream[0] * factors[i]).to(sums[i].options()).expand_as(sums[i]));
    gradients.resize(gradients.size() + 3);  // of what is no tensor
    return gradients;
  }
};

template <typename Number>
void add(std::vector<Number>& sums, const std::vector<Number>& more) {
  sums.resize(std::max(sums.size(), more.size()));
  for (std::size_t i = 0; i < more.size(); ++i) sums[i] += more[i];
}

void add(StepCounts& total, const StepCounts& call) {
  for (const auto count :
       {&StepCounts::targets, &StepCounts::tokens, &StepCounts::micro_batches,
        &StepCounts::global_micro_batches, &StepCounts::samples, &StepCounts::silent, &StepCounts::cut})
    total.*count += call.*count;
  for (const auto counts :
       {&StepCounts::targets_by_rank, &StepCounts::samples_by_rank, &StepCounts::micro_batches_by_rank})
    add(total.*counts, call.*counts);
  add(total.weights_by_rank, call.weights_by_rank);
  total.weights += call.weights;
  total.stop_requested |= call.stop_requested;
  total.rank = call.rank;
  total.call_micro_batches = call.call_micro_batches;
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

void check_terms(const LossTerms& terms, bool deferred) {
  if (terms.empty())
    refuse("forward", "no loss term", "one sum or more for each micro-batch, 0 for an empty one",
           "Return the loss terms from the forward function");
  for (const LossTerm& term : terms) {
    const std::string where = fmt::format("loss term '{}'", term.name);
    if (!term.sum.defined() || term.sum.numel() != 1)
      refuse(where,
             term.sum.defined() ? fmt::format("shape {}", c10::str(term.sum.sizes())) : "an undefined tensor",
             "a scalar: the sum over the micro-batch's tokens",
             "Sum the per-token losses; do not take their mean");
    if (!std::isfinite(term.weight))
      refuse(where, fmt::format("weight {}", term.weight), "a finite number",
             "Give this term a finite weight");
    if (is_share(term.sum))
      refuse(
          where, "a value that the normaliser has divided already", "a sum that nothing has divided",
          "Divide once: return sums from the forward function, or use NoDenominator for a loss that is normalised already");
    if (term.weight != 0) check_16_bits(where, term, deferred);
  }
}

bool is_share(const at::Tensor& value) {
  if (!value.grad_fn()) return false;
  std::vector<const torch::autograd::Node*> nodes = {value.grad_fn().get()};
  std::unordered_set<const torch::autograd::Node*> seen(nodes.begin(), nodes.end());
  while (!nodes.empty()) {
    const torch::autograd::Node& node = *nodes.back();
    nodes.pop_back();
    if (typeid(node) == typeid(torch::autograd::CppNode<Share>)) return true;
    for (const auto& edge : node.next_edges())
      if (edge.function && seen.insert(edge.function.get()).second) nodes.push_back(edge.function.get());
  }
  return false;
}

const char* name_of(Mean mean) {
  switch (mean) {
    case Mean::kStep: return "the step's";
    case Mean::kTargets: return "token_mean";
    case Mean::kSamples: return "sample_mean";
    case Mean::kWeights: return "weighted_mean";
    case Mean::kTokens: return "mean over all tokens";
    case Mean::kMicroBatches: return "mean over micro-batches";
    case Mean::kFixed: return "fixed";
    case Mean::kNone: break;
  }
  return "none";
}

int StepCounts::first_with_micro_batches() const {
  for (std::size_t r = 0; r < micro_batches_by_rank.size(); ++r)
    if (micro_batches_by_rank[r] > 0) return static_cast<int>(r);
  return 0;
}

double Denominator::of_term(const LossTerm& term) const {
  switch (term.mean) {
    case Mean::kStep: return value;
    case Mean::kTargets:
      return mean == term.mean ? value : targets;  // a deferred mean divides by its own at the end
    case Mean::kSamples:
      if (mean == term.mean) return value;
      if (samples == 0 && targets > 0 && sample_sizes.empty())
        refuse(fmt::format("loss term '{}'", term.name), "a sample mean in a step that counts no samples",
               "samples counted beforehand", "Make the normaliser with count_samples = true");
      return samples;
    case Mean::kWeights: return mean == term.mean ? value : weights;
    case Mean::kTokens: return tokens;
    case Mean::kMicroBatches: return micro_batches;
    case Mean::kFixed:
      if (!(term.denominator > 0 && std::isfinite(term.denominator)))
        refuse(fmt::format("loss term '{}'", term.name), fmt::format("denominator {}", term.denominator),
               "a finite number above 0", "Set LossTerm::denominator above 0");
      return term.denominator;
    case Mean::kNone: break;
  }
  return 1;
}

Normalizer::Normalizer(Mean mean, NormalizerOptions options, double fixed)
    : mean_(mean), options_(options), fixed_(fixed) {
  if (!(fixed > 0 && std::isfinite(fixed)))
    refuse("FixedDenominator", fmt::format("{}", fixed), "a finite number above 0",
           "Set loss.denominator above 0");
  if (options.replicas < 1)
    refuse("normalise_over", fmt::format("{} replicas", options.replicas), "1 or more",
           "Set NormalizerOptions::replicas to 1 or more");
  if (options.replicas > 1 && (mean == Mean::kFixed || mean == Mean::kNone))
    refuse(
        "normalise_over", fmt::format("a mean of per-replica means under {}", name_of(mean)),
        "one of two readings: a sum over all ranks divided by the given number, or a mean that is counted in each replica",
        "Leave normalise_over alone for the first, or choose token_mean, sample_mean or weighted_mean");
}

StepCounts Normalizer::count(const MicroBatches& micro_batches, Group& data, bool stop_requested) {
  return count(micro_batches, data, stop_requested, {});
}

StepCounts Normalizer::count(const MicroBatches& micro_batches, Group& data, bool stop_requested,
                             const std::set<std::int64_t>& earlier_samples) {
  const counting::Rule rule{.mean = mean_,
                            .samples = mean_ == Mean::kSamples || options_.count_samples,
                            .replicas = options_.replicas,
                            .fixed = fixed_};
  const auto own = counting::count_own(micro_batches, rule, stop_requested, earlier_samples);
  at::Tensor slots = at::zeros({data.size(), counting::kSlotWidth}, at::kLong);  // [W, kSlotWidth]
  std::copy(own.slot.begin(), own.slot.end(),
            slots.mutable_data_ptr<std::int64_t>() + data.rank() * counting::kSlotWidth);
  if (data.size() > 1) data.all_reduce(slots);
  StepCounts step_counts = counting::merge(slots, data.rank(), rule);
  counting::resolve_samples(own, slots, rule, data, step_counts);
  return step_counts;
}

Denominator Normalizer::denominator(const StepCounts& step_counts) const {
  const int size = static_cast<int>(step_counts.targets_by_rank.size());
  const int replicas = std::clamp(options_.replicas, 1, std::max(1, size)), ranks = size / replicas;
  // Σ over all ranks; with replicas, R · the sum over each replica's ranks.
  const auto global = [&](const auto& by_rank, double sum) -> std::vector<double> {
    if (replicas == 1) return {sum};
    std::vector<double> by_replica(replicas);
    double counting = 0;
    for (std::size_t r = 0; r < by_replica.size(); ++r) {
      for (int i = 0; i < ranks; ++i)
        by_replica[r] +=
            static_cast<double>(by_rank[r * static_cast<std::size_t>(ranks) + static_cast<std::size_t>(i)]);
      if (by_replica[r] > 0) ++counting;
    }
    // A replica that holds nothing to count has no mean: not 0, which would say that the step is empty.
    if (counting > 0)
      for (double& n : by_replica) n = n > 0 ? counting * n : std::numeric_limits<double>::infinity();
    return by_replica;
  };
  const auto mine = [&](const std::vector<double>& values) {
    return values[values.size() == 1 ? 0 : static_cast<std::size_t>(step_counts.rank / ranks)];
  };
  const auto targets = global(step_counts.targets_by_rank, static_cast<double>(step_counts.targets));
  const auto weights = global(step_counts.weights_by_rank, step_counts.weights);
  const auto samples = global(step_counts.samples_by_rank, static_cast<double>(step_counts.samples));

  Denominator result;
  result.mean = mean_;
  result.targets = mine(targets);
  result.weights = mine(weights);
  result.samples = mine(samples);
  result.tokens = static_cast<double>(step_counts.tokens);
  result.micro_batches = static_cast<double>(step_counts.global_micro_batches);
  result.sample_sizes = step_counts.sample_sizes;
  if (replicas > 1) result.over = fmt::format("data but dp_replicate, then a mean of {} replicas", replicas);
  const auto choose = [&](const char* of, const std::vector<double>& values) {
    result.of = of;
    result.value = mine(values);
    if (replicas > 1) result.by_replica = values;
  };
  // Without a valid target the step is empty under every mean.
  const double given = step_counts.targets > 0 ? fixed_ : 0;
  switch (mean_) {
    case Mean::kSamples: choose("samples", samples); break;
    case Mean::kWeights: choose("weights", weights); break;
    case Mean::kFixed: choose("a fixed number", {given}); break;
    case Mean::kNone: choose("nothing", {given}); break;
    default: choose("targets", targets);
  }
  return result;
}

Batch Normalizer::prepare(const Batch& batch, const Denominator& denominator) const {
  Batch prepared = batch;
  prepared.given_weights = batch.weights;
  const bool samples = denominator.mean == Mean::kSamples || options_.count_samples;
  if (!samples) return prepared;
  const std::int64_t length = batch.num_tokens();
  at::Tensor shares = batch.weights.defined() ? batch.weights.detach().to(at::kCPU, at::kDouble, false, true)
                                              : at::ones({length}, at::kDouble);
  auto* share = shares.mutable_data_ptr<double>();
  for (std::size_t f = 0; f < batch.sample_ids.size(); ++f) {
    const auto size = denominator.sample_sizes.find(batch.sample_ids[f]);
    // Nothing of this sample is valid here: its tokens carry no loss, whatever they weigh.
    const double t_b = size != denominator.sample_sizes.end() ? size->second : 0;
    for (auto t = batch.cu_seqlens[f]; t < batch.cu_seqlens[f + 1]; ++t)
      share[t] = t_b > 0 ? share[t] / t_b : 0;
  }
  prepared.sample_weights = batch.targets.defined() ? shares.to(batch.targets.device()) : shares;
  if (denominator.mean == Mean::kSamples) prepared.weights = prepared.sample_weights;
  return prepared;
}

at::Tensor weights_for(const Batch& prepared, Mean mean) {
  if (mean == Mean::kStep) return prepared.weights;
  if (mean != Mean::kSamples) return prepared.given_weights;
  if (!prepared.sample_weights.defined())
    refuse("weights_for", "a sample mean in a step that counts no samples", "samples counted beforehand",
           "Make the normaliser with count_samples = true");
  return prepared.sample_weights;
}

at::Tensor Normalizer::scale(const LossTerms& terms, const Denominator& denominator) const {
  check_terms(terms, /*deferred=*/false);
  return share_of(terms, denominator);
}

std::vector<std::optional<double>> factors_of(const LossTerms& terms, const Denominator& denominator) {
  std::vector<std::optional<double>> factors;
  for (const LossTerm& term : terms) {
    const double divisor = denominator.of_term(term);
    factors.push_back(divisor != 0 && term.weight != 0 ? std::optional(term.weight / divisor) : std::nullopt);
  }
  return factors;
}

at::Tensor share_of(const LossTerms& terms, const Denominator& denominator) {
  // A term without denominator is a zero that hangs on nothing, so that a NaN of the model cannot reach a
  // gradient as NaN · 0.
  const auto all = factors_of(terms, denominator);
  std::vector<at::Tensor> sums;
  std::vector<double> factors;
  for (std::size_t i = 0; i < terms.size(); ++i)
    if (all[i]) sums.push_back(terms[i].sum), factors.push_back(*all[i]);
  if (sums.empty()) return at::zeros({}, terms.front().sum.options().dtype(at::kDouble)).requires_grad_(true);
  return Share::apply(at::TensorList(sums), factors, std::nullopt, std::nullopt);
}

at::Tensor share_on_device(const LossTerms& terms, const at::Tensor& factors) {
  std::vector<at::Tensor> sums;
  for (const LossTerm& term : terms) sums.push_back(term.sum);
  return Share::apply(at::TensorList(sums), std::vector<double>{}, factors, std::nullopt);
}

at::Tensor share_of_value(const at::Tensor& mean, double fraction, double value) {
  const std::vector<at::Tensor> one = {mean};
  return Share::apply(at::TensorList(one), std::vector<double>{fraction}, std::nullopt, value);
}

bool debug_build() {
#ifdef ISOGRAD_DEBUG_CHECKS
  return true;
#else
  return false;
#endif
}

void check_agreement(const Denominator& denominator, Group& data) {
  if (data.size() == 1) return;
  std::vector<double> numbers = {static_cast<double>(denominator.mean), denominator.gradient_scale,
                                 denominator.micro_batches, denominator.tokens};
  if (denominator.by_replica.empty())
    numbers.insert(numbers.end(),
                   {denominator.value, denominator.targets, denominator.weights, denominator.samples});
  else
    numbers.insert(numbers.end(), denominator.by_replica.begin(), denominator.by_replica.end());
  const at::Tensor all = data.all_gather(at::tensor(numbers, at::kDouble));  // [W, numbers]
  for (int rank = 1; rank < data.size(); ++rank)
    ISOGRAD_INVARIANT(at::equal(all[rank], all[0]), fmt::format("rank {} divides by {}, rank 0 by {}", rank,
                                                                c10::str(all[rank]), c10::str(all[0])));
}

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

}  // namespace isograd
