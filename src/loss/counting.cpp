#include "loss/counting.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/refuse.hpp"

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
      if (!(weight[t] >= 0 && std::isfinite(weight[t]))) {
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
ErrorText describe(int rank, const std::int64_t* slot) {
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
          "a finite number, 0 or more",
          "Make the weights finite and 0 or more; a token without loss has weight 0 or target kIgnoreIndex"};
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

OwnCounts count_own(const MicroBatches& micro_batches, const Rule& rule, bool stop_requested,
                    const std::set<std::int64_t>& earlier_samples) {
  OwnCounts counts;
  counts.slot.assign(kSlotWidth, 0);
  Counter counter(counts, rule, earlier_samples);
  for (std::size_t i = 0; i < micro_batches.size(); ++i)
    counter.add(micro_batches[i], static_cast<std::int64_t>(i));
  counter.finish();
  counts.slot[kMicroBatches] = std::ssize(micro_batches);
  counts.slot[kStop] = stop_requested ? 1 : 0;
  counts.slot[kRule] =
      static_cast<std::int64_t>(rule.mean) + (rule.samples ? 100 : 0) + std::int64_t{1000} * rule.replicas;
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
    if (slot_of(r)[kProblem] != kNone) throw ConfigError(describe(r, slot_of(r)));
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
