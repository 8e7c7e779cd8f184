// Counting a step; the one division, at once or when the step ends; the terms as they are logged.
#include "loss/normalizer.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <typeinfo>

#include "base/refuse.hpp"
#include "loss/share.hpp"
#include "loss/term_graph.hpp"

namespace isograd::counting {
namespace {

std::int64_t bits(double value) { return std::bit_cast<std::int64_t>(value); }
double number(std::int64_t bits) { return std::bit_cast<double>(bits); }

enum Problem : std::int64_t {
  kNone,
  kShape,            // micro-batch, tokens, targets
  kFragments,        // micro-batch, ids, declared lengths
  kWeightsShape,     // micro-batch, tokens, weights
  kWeightsType,      // micro-batch
  kWeightValue,      // micro-batch, token, bits
  kWeightsUnwanted,  // micro-batch
  kDeclaredTwice,    // id, two lengths
  kHoldsMore,        // id, held, declared
  kSeenBefore,       // id
};

class Counter {
 public:
  Counter(OwnCounts& counts, const Rule& rule, const std::set<std::int64_t>& earlier_samples)
      : counts_(counts), rule_(rule), earlier_(earlier_samples) {}

  void add(const Batch& batch, std::int64_t number_of_batch) {
    batch_ = number_of_batch;
    const std::int64_t length = batch.num_tokens();
    counts_.slot[kTokens] += length;
    const at::Tensor targets =
        batch.targets.defined() ? batch.targets.cpu().contiguous() : at::empty({0}, at::kLong);
    if (targets.numel() != length || targets.scalar_type() != at::kLong)
      return problem(kShape, batch_, length, targets.numel());
    if (rule_.samples && (std::ssize(batch.sample_ids) + 1 != std::ssize(batch.cu_seqlens) ||
                          batch.sample_targets.size() != batch.sample_ids.size()))
      return problem(kFragments, batch_, batch.num_fragments(), std::ssize(batch.sample_targets));
    const at::Tensor weights = checked_weights(batch, length);
    const auto* target = targets.const_data_ptr<std::int64_t>();
    const double* weight = weights.defined() ? weights.const_data_ptr<double>() : nullptr;
    for (std::size_t f = 0; f + 1 < batch.cu_seqlens.size(); ++f) {
      std::int64_t valid = 0;
      double sum = 0;
      for (auto t = batch.cu_seqlens[f]; t < batch.cu_seqlens[f + 1]; ++t) {
        if (target[t] == kIgnoreIndex) continue;
        ++valid;
        if (weight) sum += weight[t];
      }
      if (!weight) sum = static_cast<double>(valid);
      counts_.slot[kTargets] += valid;
      weights_ += sum;
      if (rule_.samples) add_fragment(batch.sample_ids[f], valid, batch.sample_targets[f], sum);
    }
  }

  void finish() {
    counts_.slot[kWeightsBits] = bits(weights_);
    for (const auto& [id, sample] : counts_.samples) {
      if (sample.held > sample.declared) problem(kHoldsMore, id, sample.held, sample.declared);
      if (earlier_.contains(id)) problem(kSeenBefore, id);
      if (counts_.is_cut(sample))
        ++counts_.slot[kCutSamples];
      else if (sample.held == sample.declared)
        ++counts_.slot[sample.weight > 0 ? kWholeSamples : kSilentSamples];
    }
  }

 private:
  void problem(Problem what, std::int64_t a = 0, std::int64_t b = 0, std::int64_t c = 0) {
    if (counts_.slot[kProblem] != kNone) return;
    counts_.slot[kProblem] = what;
    counts_.slot[kProblemA] = a;
    counts_.slot[kProblemB] = b;
    counts_.slot[kProblemC] = c;
  }

  // fp64, or undefined where there are none.
  at::Tensor checked_weights(const Batch& batch, std::int64_t length) {
    if (!batch.weights.defined()) return {};
    counts_.slot[kHasWeights] = 1;
    if (rule_.mean == Mean::kTargets) problem(kWeightsUnwanted, batch_);
    if (batch.weights.dim() != 1 || batch.weights.numel() != length) {
      problem(kWeightsShape, batch_, length, batch.weights.numel());
      return {};
    }
    const auto type = batch.weights.scalar_type();
    if (!at::isFloatingType(type) && type != at::kBool) {
      problem(kWeightsType, batch_);
      return {};
    }
    const at::Tensor weights = batch.weights.detach().to(at::kCPU, at::kDouble).contiguous();
    const double* weight = weights.const_data_ptr<double>();
    for (std::int64_t t = 0; t < length; ++t)
      if (!((weight[t] >= 0 || rule_.signed_weights) && std::isfinite(weight[t]))) {
        problem(kWeightValue, batch_, t, bits(weight[t]));
        return {};
      }
    return weights;
  }

  void add_fragment(std::int64_t id, std::int64_t valid, std::int64_t declared, double weight) {
    if (id == kPaddingSample && valid == 0) return;  // nobody's
    const auto [place, first] = counts_.samples.try_emplace(id);
    Sample& sample = place->second;
    if (first) sample.declared = declared;
    if (sample.declared != declared) problem(kDeclaredTwice, id, sample.declared, declared);
    sample.held += valid;
    sample.weight += weight;
  }

  OwnCounts& counts_;
  const Rule& rule_;
  const std::set<std::int64_t>& earlier_;
  std::int64_t batch_ = 0;
  double weights_ = 0;
};

// The error that the problem in a rank's slot stands for.
ErrorText describe(int rank, const std::int64_t* slot, const Rule& rule) {
  const std::int64_t a = slot[kProblemA], b = slot[kProblemB], c = slot[kProblemC];
  const std::string batch = fmt::format("rank {}, micro-batch {}", rank, a),
                    sample = fmt::format("rank {}, sample {}", rank, a);
  switch (slot[kProblem]) {
    case kShape:
      return {batch, fmt::format("cu_seqlens over {} tokens, {} targets", b, c),
              "int64 targets, as many as tokens", "Give one target per token, as int64"};
    case kFragments:
      return {batch, fmt::format("{} sample ids and {} sample_targets", b, c),
              "one of each for each fragment",
              "Give every fragment its sample's id and that sample's valid targets in the whole step"};
    case kWeightsShape:
      return {batch, fmt::format("{} weights for {} tokens", c, b), "a flat tensor, one for each token",
              "Give one weight per token"};
    case kWeightsType:
      return {batch, "weights that are integers", "floating point, or bool as a mask",
              "Convert Batch::weights"};
    case kWeightValue:
      return {
          fmt::format("{}, weights[{}]", batch, b), fmt::format("{}", number(c)),
          rule.signed_weights ? "a finite number" : "a finite number, 0 or more",
          rule.signed_weights
              ? "Look for where the weight was computed"
              : "Make the weights finite and 0 or more; a token without loss has weight 0 or target kIgnoreIndex. Weights of both signs need NormalizerOptions::signed_weights, under none and fixed alone"};
    case kWeightsUnwanted:
      return {batch, "weights under the token mean, which divides by the number of targets",
              "one of two readings: sum of w*loss over sum of w, or sum of w*loss over a number",
              "Use weighted_mean for the first, fixed for the second, or drop the weights"};
    case kDeclaredTwice:
      return {sample, fmt::format("fragments that declare {} and {} valid targets in the step", b, c),
              "one sample_targets for all fragments of a sample",
              "Declare each sample's length in the whole step, and give different samples different ids"};
    case kHoldsMore:
      return {sample,
              fmt::format("{} valid targets on this rank alone, {} declared for the whole step", b, c),
              "at most as many as declared",
              "Declare each sample's length in the whole step, and give different samples different ids"};
    default:
      return {sample, "a sample of an earlier call of the same step",
              "whole samples in each call of a deferred sample mean",
              "Keep a sample's fragments in one call, or use a deferred token mean"};
  }
}

enum Column : std::int64_t { kId, kHeld, kDeclared, kWeight, kColumns };

[[noreturn]] void refuse_sample(std::int64_t id, std::string found, std::string expected,
                                std::string action) {
  refuse(fmt::format("sample {}", id), std::move(found), std::move(expected), std::move(action));
}

// Every rank's cut samples, put together; the same on all ranks.
std::map<std::int64_t, Sample> join(const at::Tensor& rows, const std::vector<std::int64_t>& rows_by_rank,
                                    const Rule& rule) {
  const int ranks_of_replica = static_cast<int>(rows_by_rank.size()) / rule.replicas;
  std::map<std::int64_t, Sample> samples;
  const auto* row = rows.const_data_ptr<std::int64_t>();
  for (int rank = 0; rank < static_cast<int>(rows_by_rank.size()); ++rank)
    for (std::int64_t i = 0; i < rows_by_rank[rank]; ++i, row += kColumns) {
      const std::int64_t id = row[kId];
      const auto [place, first] = samples.try_emplace(id);
      Sample& sample = place->second;
      if (first) {
        sample.declared = row[kDeclared];
        sample.owner = rank;
      }
      if (sample.declared != row[kDeclared])
        refuse_sample(
            id,
            fmt::format("fragments that declare {} valid targets on rank {} and {} on rank {}",
                        sample.declared, sample.owner, row[kDeclared], rank),
            "one sample_targets for all fragments of a sample",
            "Declare each sample's length in the whole step, and give different samples different ids");
      if (sample.owner / ranks_of_replica != rank / ranks_of_replica)
        refuse_sample(
            id,
            fmt::format(
                "fragments on ranks {} and {}, of different replicas, though the mean is taken inside each replica",
                sample.owner, rank),
            "one of two readings: the mean over all samples, or the mean of per-replica means of whole samples",
            "Add dp_replicate to loss.normalise_over for the first, or keep each sample on one replica");
      sample.held += row[kHeld];
      sample.weight += number(row[kWeight]);
    }
  for (const auto& [id, sample] : samples)
    if (sample.held != sample.declared)
      refuse_sample(
          id,
          fmt::format("{} valid targets on all ranks together, {} declared for the whole step", sample.held,
                      sample.declared),
          "every fragment of a sample in the step, under one id",
          "Look for a fragment that carries another id, lies in another step or call, or was dropped; or declare the length that this step holds");
  return samples;
}

}  // namespace

OwnCounts count_own(const MicroBatches& micro_batches, const Rule& rule, Requests requests,
                    const std::set<std::int64_t>& earlier_samples) {
  OwnCounts counts;
  counts.slot.assign(kSlotWidth, 0);
  Counter counter(counts, rule, earlier_samples);
  for (std::size_t i = 0; i < micro_batches.size(); ++i)
    counter.add(micro_batches[i], static_cast<std::int64_t>(i));
  counter.finish();
  counts.slot[kMicroBatches] = std::ssize(micro_batches);
  counts.slot[kStop] = requests.stop ? 1 : 0, counts.slot[kSave] = requests.save ? 1 : 0;
  counts.slot[kRule] = static_cast<std::int64_t>(rule.mean) + (rule.signed_weights ? 50 : 0) +
                       (rule.samples ? 100 : 0) + std::int64_t{1000} * rule.replicas;
  counts.slot[kRuleValueBits] = bits(rule.fixed);
  return counts;
}

StepCounts merge(const at::Tensor& slots, int rank, const Rule& rule) {
  const int size = static_cast<int>(slots.size(0));
  const auto* first = slots.const_data_ptr<std::int64_t>();
  const auto slot_of = [&](int r) { return first + r * kSlotWidth; };
  for (int r = 0; r < size; ++r) {
    if (slot_of(r)[kRule] != first[kRule] || slot_of(r)[kRuleValueBits] != first[kRuleValueBits])
      refuse("counting the step", fmt::format("another kind of mean on rank {} than on rank 0", r),
             "one normaliser, with the same numbers, on every rank",
             "Make the normaliser from the same configuration everywhere");
    if (slot_of(r)[kProblem] != kNone) throw ConfigError(describe(r, slot_of(r), rule));
  }
  if (size % rule.replicas != 0)
    refuse("normalise_over", fmt::format("{} ranks in {} replicas", size, rule.replicas),
           "replicas of equally many ranks", "Choose a number of replicas that divides the ranks");

  StepCounts step_counts;
  step_counts.rank = rank;
  for (int r = 0; r < size; ++r) {
    const auto* slot = slot_of(r);
    step_counts.targets += slot[kTargets];
    step_counts.tokens += slot[kTokens];
    step_counts.micro_batches += slot[kMicroBatches];
    step_counts.global_micro_batches = step_counts.call_micro_batches =
        std::max(step_counts.global_micro_batches, slot[kMicroBatches]);
    step_counts.stop_requested |= slot[kStop] != 0;
    step_counts.save_requested |= slot[kSave] != 0;
    step_counts.weights += number(slot[kWeightsBits]);
    step_counts.samples += slot[kWholeSamples];
    step_counts.silent += slot[kSilentSamples];
    step_counts.targets_by_rank.push_back(slot[kTargets]);
    step_counts.weights_by_rank.push_back(number(slot[kWeightsBits]));
    step_counts.samples_by_rank.push_back(slot[kWholeSamples]);
    step_counts.micro_batches_by_rank.push_back(slot[kMicroBatches]);
  }
  return step_counts;
}

void resolve_samples(const OwnCounts& counts, const at::Tensor& slots, const Rule& rule, Group& data,
                     StepCounts& step_counts) {
  if (!rule.samples) return;
  for (const auto& [id, sample] : counts.samples)
    if (sample.held > 0) step_counts.sample_sizes[id] = sample.weight;

  std::vector<std::int64_t> rows_by_rank;
  std::int64_t total = 0;
  for (std::int64_t r = 0; r < slots.size(0); ++r) {
    rows_by_rank.push_back(slots.const_data_ptr<std::int64_t>()[r * kSlotWidth + kCutSamples]);
    total += rows_by_rank.back();
  }
  if (total == 0) return;

  at::Tensor own = at::empty({counts.slot[kCutSamples], kColumns}, at::kLong);
  auto* row = own.mutable_data_ptr<std::int64_t>();
  for (const auto& [id, sample] : counts.samples) {
    if (!counts.is_cut(sample)) continue;
    row[kId] = id;
    row[kHeld] = sample.held;
    row[kDeclared] = sample.declared;
    row[kWeight] = bits(sample.weight);
    row += kColumns;
  }
  at::Tensor rows = own;
  if (data.size() > 1) {
    rows = at::empty({total, kColumns}, at::kLong);
    data.all_gather_rows_async(rows, own, rows_by_rank).wait();
  }
  for (const auto& [id, sample] : join(rows, rows_by_rank, rule)) {
    if (const auto place = step_counts.sample_sizes.find(id); place != step_counts.sample_sizes.end())
      place->second = sample.weight;
    ++step_counts.cut;
    if (sample.weight > 0) {
      ++step_counts.samples;
      ++step_counts.samples_by_rank[sample.owner];
    } else {
      ++step_counts.silent;
    }
  }
}

}  // namespace isograd::counting

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
  total.save_requested |= call.save_requested;
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
  bool found = false;
  walk(value, true, [&](const torch::autograd::Node& node, bool, const auto& go) {
    found = found || typeid(node) == typeid(torch::autograd::CppNode<Share>);
    for (const auto& edge : node.next_edges()) go(edge, true);
  });
  return found;
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
    case Mean::kWeights:
      if (signed_weights)
        refuse(fmt::format("loss term '{}'", term.name), "a weighted mean in a step of signed weights",
               "a mean that is not divided by their sum", "Give the term another mean");
      return mean == term.mean ? value : weights;
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
  if (options.signed_weights && ((mean != Mean::kNone && mean != Mean::kFixed) || options.count_samples))
    refuse(
        "NormalizerOptions::signed_weights",
        options.count_samples ? "a step that counts samples" : name_of(mean),
        "none or fixed: a sum of signed weights may be 0 or negative, and is nothing to divide by",
        "Take NoDenominator or FixedDenominator, without count_samples; or divide by a count of your own, as Batch::weights of a WeightedMean");
}

StepCounts Normalizer::count(const MicroBatches& micro_batches, Group& data, Requests requests) {
  return count(micro_batches, data, requests, {});
}

StepCounts Normalizer::count(const MicroBatches& micro_batches, Group& data, Requests requests,
                             const std::set<std::int64_t>& earlier_samples) {
  const counting::Rule rule{.mean = mean_,
                            .samples = mean_ == Mean::kSamples || options_.count_samples,
                            .replicas = options_.replicas,
                            .fixed = fixed_,
                            .signed_weights = options_.signed_weights};
  const auto own = counting::count_own(micro_batches, rule, requests, earlier_samples);
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
  result.signed_weights = options_.signed_weights;
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
  // A term without denominator is a constant zero without autograd history, so that a NaN of the model cannot
  // reach a gradient as NaN · 0.
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

StepCounts Deferred::count(const MicroBatches& micro_batches, Group& data, Requests requests) {
  add(total_, of_->count(micro_batches, data, requests, samples_));
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

// ---- the terms, as they are logged ----

void TermSums::clear() {
  loss_ = 0;
  terms_.clear();
}

void TermSums::add(const LossTerms& terms, const at::Tensor& share, const Denominator& denominator,
                   const StepCounts& step_counts, Readings& readings) {
  readings.add_loss(share, [this](double value) { loss_ += value; });
  if (terms_.empty()) {
    if (terms.size() > kMostTerms)
      refuse("loss terms", fmt::format("{} terms", terms.size()), fmt::format("at most {}", kMostTerms),
             "Add some of them up");
    for (const LossTerm& term : terms) {
      if (term.name.empty() || term.name.size() > kLongestName)
        refuse("loss terms", fmt::format("a term named '{}'", term.name),
               fmt::format("1 to {} letters", kLongestName), "Rename it");
      terms_.push_back({term.name, 0});
    }
  }
  if (terms.size() != terms_.size())
    refuse("loss terms",
           fmt::format("{} terms after {} in the step's first micro-batch", terms.size(), terms_.size()),
           "the same terms in every micro-batch", "Return a sum of 0 for a term that has nothing to add");
  for (std::size_t i = 0; i < terms.size(); ++i) {
    const LossTerm& term = terms[i];
    if (term.name != terms_[i].name)
      refuse("loss terms",
             fmt::format("'{}' where the step's first micro-batch had '{}'", term.name, terms_[i].name),
             "the same terms in the same order in every micro-batch", "Return them in one order");
    const double divisor = denominator.of_term(term);
    if (divisor == 0 || std::isinf(divisor)) continue;  // nothing is counted, in the step or this replica
    const bool ours = !term.replicated || step_counts.rank == step_counts.first_with_micro_batches();
    readings.add(term.sum, [this, i, divisor, ours, weight = term.weight](double sum) {
      if (ours)
        terms_[i].value += sum / divisor;
      else if (weight != 0)  // it is in the share, and another rank logs it
        loss_ -= weight * (sum / divisor);
    });
  }
}

bool TermNames::differ_from(const std::vector<TermValue>& own) const {
  return !own.empty() && !std::ranges::equal(own, names_, {}, &TermValue::name);
}

void TermNames::agree(const std::vector<TermValue>& own, Group& all) {
  constexpr std::int64_t kMostTerms = TermSums::kMostTerms, kWidth = 1 + TermSums::kLongestName;
  at::Tensor written = at::zeros({kMostTerms, kWidth}, at::kByte);  // a name's length, then its letters
  auto* row = written.mutable_data_ptr<std::uint8_t>();
  for (const TermValue& term : own) {
    row[0] = static_cast<std::uint8_t>(term.name.size());
    std::memcpy(row + 1, term.name.data(), term.name.size());
    row += kWidth;
  }
  const at::Tensor rows = all.size() > 1 ? all.all_gather(written) : written.unsqueeze(0);
  int first = -1;
  for (int rank = 0; rank < all.size(); ++rank) {
    std::vector<std::string> names;
    const auto* letters = rows.const_data_ptr<std::uint8_t>() + rank * kMostTerms * kWidth;
    for (std::int64_t i = 0; i < kMostTerms && letters[0] > 0; ++i, letters += kWidth)
      names.emplace_back(reinterpret_cast<const char*>(letters) + 1, letters[0]);
    if (names.empty()) continue;
    if (first < 0)
      first = rank, names_ = std::move(names);
    else if (names != names_)
      refuse("loss terms",
             fmt::format(
                 "terms with other names or in another order on some rank: '{}' on rank {}, '{}' on rank {}",
                 fmt::join(names_, "', '"), first, fmt::join(names, "', '"), rank),
             "the same terms on every rank", "Return a sum of 0 for a term that has nothing to add");
  }
}

}  // namespace isograd
