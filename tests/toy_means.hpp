// Samples cut into pieces and assigned to ranks and micro-batches in many ways; the loss of each kind of mean
// by plain code from the samples themselves.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <optional>

#include "isograd/loss.hpp"
#include "isograd/step.hpp"
#include "isograd/world.hpp"
#include "planted.hpp"
#include "toy.hpp"

namespace isograd::toy {

struct Sample {
  at::Tensor tokens, targets, weights;  // [T]
};

// Part of a sample: tokens [begin, end), in one pack of one rank's micro-batch.
struct Piece {
  std::int64_t sample = 0, begin = 0, end = 0;
  int rank = 0, micro_batch = 0;
};

struct Assignment {
  std::vector<Sample> samples;  // id = 3 · index + 1
  std::vector<Piece> pieces;    // together every token of every sample
  std::vector<MicroBatches> by_rank;
};

inline Sample make_sample(std::int64_t length, std::uint64_t seed, bool silent = false) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(5000 + seed);
  const auto integers = at::TensorOptions(at::kLong);
  const at::Tensor text = at::randint(0, kVocabulary, {length + 1}, generator, integers);
  Sample sample{text.narrow(0, 0, length), text.narrow(0, 1, length).clone(),
                at::randint(0, 5, {length}, generator, integers).to(at::kDouble) * 0.5};
  sample.targets[length - 1] = kIgnoreIndex;  // the end of the document
  if (length > 4) sample.targets[2] = kIgnoreIndex;
  if (length > 2) sample.weights[0] = 1.5;  // not all 0
  if (silent) sample.targets.fill_(kIgnoreIndex);
  return sample;
}

// Micro-batches that get no piece stay empty batches; `micro_batches[r]` of rank r.
inline void build(Assignment& assigned, const std::vector<int>& micro_batches, bool weighted) {
  assigned.by_rank.clear();
  for (std::size_t rank = 0; rank < micro_batches.size(); ++rank) {
    MicroBatches batches;
    for (int m = 0; m < micro_batches[rank]; ++m) {
      Batch batch;
      std::vector<at::Tensor> tokens, targets, positions, weights;
      for (const Piece& piece : assigned.pieces) {
        if (piece.rank != static_cast<int>(rank) || piece.micro_batch != m || piece.begin == piece.end)
          continue;
        const Sample& sample = assigned.samples[static_cast<std::size_t>(piece.sample)];
        const std::int64_t length = piece.end - piece.begin;
        tokens.push_back(sample.tokens.narrow(0, piece.begin, length));
        targets.push_back(sample.targets.narrow(0, piece.begin, length));
        weights.push_back(sample.weights.narrow(0, piece.begin, length));
        positions.push_back(at::arange(length));
        batch.cu_seqlens.push_back(batch.cu_seqlens.back() + length);
        batch.sample_ids.push_back(3 * piece.sample + 1);
        batch.sample_targets.push_back(sample.targets.ne(kIgnoreIndex).sum().item<std::int64_t>());
      }
      if (tokens.empty()) {
        batch = empty_batch();
        if (weighted) batch.weights = at::empty({0}, at::kDouble);
      } else {
        batch.tokens = at::cat(tokens);
        batch.targets = at::cat(targets);
        batch.positions = at::cat(positions);
        if (weighted) batch.weights = at::cat(weights);
      }
      batches.push_back(std::move(batch));
    }
    assigned.by_rank.push_back(std::move(batches));
  }
}

inline const std::vector<std::string> kAssignments = {
    "even", "uneven", "a rank empty", "a micro-batch empty", "one sample in five", "packs", "all invalid"};

// One step over `ranks` ranks with `accumulation` micro-batches each, assigned as the name says.
inline Assignment assign(const std::string& name, int ranks, int accumulation, bool weighted) {
  Assignment assigned;
  std::vector<int> micro_batches(static_cast<std::size_t>(ranks), accumulation);
  const auto whole = [&](std::int64_t length, int rank, int m, bool silent = false) {
    const auto index = static_cast<std::int64_t>(assigned.samples.size());
    assigned.samples.push_back(make_sample(length, static_cast<std::uint64_t>(index), silent));
    assigned.pieces.push_back({index, 0, length, rank, m});
  };
  const int empty_rank = name == "a rank empty" && ranks > 1 ? ranks / 2 : -1;
  const int places = ranks * accumulation;
  if (name == "packs") {  // laid end to end, cut every 7 tokens, packs assigned round
    std::int64_t position = 0;
    for (int i = 0; i < 2 * places + 1; ++i) {
      const std::int64_t length = 2 + (5 * i) % 17;
      assigned.samples.push_back(make_sample(length, static_cast<std::uint64_t>(i)));
      for (std::int64_t begin = 0; begin < length;) {
        const std::int64_t pack = position / 7, end = std::min(length, begin + 7 - position % 7);
        const int place = static_cast<int>(pack) % places;
        assigned.pieces.push_back({i, begin, end, place % ranks, place / ranks});
        position += end - begin;
        begin = end;
      }
    }
  } else {
    for (int rank = 0; rank < ranks; ++rank) {
      if (rank == empty_rank) {
        micro_batches[static_cast<std::size_t>(rank)] = 0;
        continue;
      }
      for (int m = 0; m < accumulation; ++m) {
        if (name == "a micro-batch empty" && rank == 0 && m == 0 && places > 1) continue;
        const bool silent = name == "all invalid";
        // At least two samples in each place: a mean over one thing could not be wrong.
        whole(name == "even" ? 6 : 4 + (7 * rank + 3 * m) % 11, rank, m, silent);
        whole(name == "even" ? 6 : 2 + (4 * rank + m) % 6, rank, m, silent);
        if (name != "even" && (rank + m) % 2 == 1) whole(5, rank, m, silent);
      }
    }
    if (name == "one sample in five") {
      const auto index = static_cast<std::int64_t>(assigned.samples.size());
      assigned.samples.push_back(make_sample(31, 99));
      const std::int64_t cuts[] = {0, 3, 12, 13, 24, 31};
      for (int i = 0; i < 5; ++i)
        assigned.pieces.push_back({index, cuts[i], cuts[i + 1], (2 * i) % ranks, i % accumulation});
    }
  }
  build(assigned, micro_batches, weighted);
  return assigned;
}

// −log p of each of the piece's targets, 0 where there is none.
inline at::Tensor token_losses(const at::Tensor& logits, const at::Tensor& targets) {
  const at::Tensor ignored = targets.eq(kIgnoreIndex).unsqueeze(1);
  return -at::log_softmax(logits, 1)
              .gather(1, targets.unsqueeze(1).masked_fill(ignored, 0))
              .masked_fill(ignored, 0)
              .squeeze(1);
}

// The sum that a forward returns.
inline at::Tensor weighted_sum(const at::Tensor& losses, const at::Tensor& weights) {
  return weights.defined() ? (losses * weights.to(losses.scalar_type())).sum() : losses.sum();
}

inline constexpr double kFixedNumber = 37.5;

// Σ w ℓ over a piece, on one process.
inline at::Tensor piece_sum(const Model& model, const Assignment& assigned, const Piece& piece,
                            bool weighted) {
  const Sample& sample = assigned.samples[static_cast<std::size_t>(piece.sample)];
  const std::int64_t length = piece.end - piece.begin;
  Batch alone;
  alone.tokens = sample.tokens.narrow(0, piece.begin, length);
  alone.cu_seqlens = {0, length};
  alone.sample_ids = {3 * piece.sample + 1};
  const at::Tensor losses = token_losses(model.logits(alone), sample.targets.narrow(0, piece.begin, length));
  return weighted ? (losses * sample.weights.narrow(0, piece.begin, length)).sum() : losses.sum();
}

// The divisor of each piece's sum under the declared kind, counted from the samples; 0: it takes no part.
inline std::vector<double> divisors(const Assignment& assigned, Mean mean, bool weighted) {
  double targets = 0, weights = 0, counted = 0;
  std::vector<double> sizes;
  for (const Sample& sample : assigned.samples) {
    const at::Tensor valid = sample.targets.ne(kIgnoreIndex).to(at::kDouble);
    sizes.push_back((weighted ? valid * sample.weights : valid).sum().item<double>());
    targets += valid.sum().item<double>();
    weights += sizes.back();
    if (sizes.back() > 0) ++counted;
  }
  std::vector<double> result;
  for (const Piece& piece : assigned.pieces) {
    const double size = sizes[static_cast<std::size_t>(piece.sample)];
    const double divisor = mean == Mean::kTargets   ? targets
                           : mean == Mean::kWeights ? weights
                           : mean == Mean::kSamples ? size * counted
                           : mean == Mean::kFixed   ? kFixedNumber
                                                    : 1;
    result.push_back(piece.begin < piece.end && targets > 0 && size > 0 ? divisor : 0);
  }
  return result;
}

// The loss of the declared kind on one process, piece by piece.
inline Reference reference(const Model& model, const Assignment& assigned, Mean mean, bool weighted) {
  const auto divided_by = divisors(assigned, mean, weighted);
  at::Tensor loss = at::zeros({}, at::kDouble);
  for (std::size_t i = 0; i < assigned.pieces.size(); ++i)
    if (divided_by[i] > 0)
      loss = loss + piece_sum(model, assigned, assigned.pieces[i], weighted) / divided_by[i];
  Reference result;
  result.loss = loss.item<double>();
  const auto parameters = model.trainable();
  if (loss.requires_grad())
    result.gradients = torch::autograd::grad({loss}, parameters, {}, false, false, /*allow_unused=*/true);
  result.gradients.resize(parameters.size());
  for (std::size_t i = 0; i < parameters.size(); ++i)
    if (!result.gradients[i].defined()) result.gradients[i] = at::zeros_like(parameters[i].detach());
  return result;
}

inline std::unique_ptr<Normalizer> make_normalizer(Mean mean, NormalizerOptions options = {}) {
  switch (mean) {
    case Mean::kTargets: return std::make_unique<TokenMean>(options);
    case Mean::kSamples: return std::make_unique<SampleMean>(options);
    case Mean::kWeights: return std::make_unique<WeightedMean>(options);
    case Mean::kFixed: return std::make_unique<FixedDenominator>(kFixedNumber, options);
    default: return std::make_unique<NoDenominator>(options);
  }
}

// ---- one step of the toy model on these samples, on ranks as threads ----

using MakeMean = std::function<std::unique_ptr<Normalizer>()>;

struct Outcome {
  std::vector<std::vector<at::Tensor>> gradients;  // per rank
  std::vector<StepReport> reports;
};

struct Setting {
  MakeMean mean;
  bool averages = false;  // gradients averaged over the ranks
  int calls = 1;          // accumulate() is called with this many parts of the micro-batches
  at::ScalarType type = at::kDouble;
  // Whether every step asserts that the ranks divide by the same numbers; as the build says unless given.
  std::optional<bool> checked{};
  std::string nudged{};  // this parameter's reduced gradient is 1 + 1e-5 times what it should be
};

struct Nudges : planted::Wrapped {
  std::string name;
  Nudges(std::unique_ptr<DataParallel> inner_, std::string name_)
      : Wrapped(std::move(inner_)), name(std::move(name_)) {}
  void finish_reduction() override {
    inner->finish_reduction();
    for (auto& view : views())
      if (view.name == name) view.gradient.mul_(1 + 1e-5);
  }
};

inline Outcome run(const Assignment& assigned, const Setting& setting) {
  const int size = static_cast<int>(assigned.by_rank.size());
  Outcome outcome;
  outcome.gradients.resize(static_cast<std::size_t>(size));
  outcome.reports.resize(static_cast<std::size_t>(size));
  run_ranks(size, [&](World& world) {
    Model model(setting.type);
    std::unique_ptr<DataParallel> layout =
        bucketed(trainable_parameters(model.named()), world.group, {.bucket_bytes = 256});
    if (setting.averages) layout = std::make_unique<planted::Averages>(std::move(layout));
    if (!setting.nudged.empty()) layout = std::make_unique<Nudges>(std::move(layout), setting.nudged);
    const auto mean = setting.mean();
    const auto optimizer = sgd({.learning_rate = 0});
    Step step(
        [&](const Batch& batch) -> LossTerms {
          return {{"cross_entropy",
                   weighted_sum(token_losses(model.logits(batch), batch.targets), batch.weights)}};
        },
        *layout, *mean, *optimizer, {.check_denominators = setting.checked.value_or(debug_build())});
    const auto rank = static_cast<std::size_t>(world.rank);
    const MicroBatches& own = assigned.by_rank[rank];
    for (int call = 0; call < setting.calls; ++call) {
      const auto cut = [&](int i) {
        return own.begin() + static_cast<std::ptrdiff_t>(own.size() * static_cast<std::size_t>(i) /
                                                         static_cast<std::size_t>(setting.calls));
      };
      step.accumulate({cut(call), cut(call + 1)});
    }
    outcome.reports[rank] = step.finish();
    for (auto& view : layout->views())
      outcome.gradients[rank].push_back(view.gradient.to(at::kDouble) * outcome.reports[rank].gradient_scale);
  });
  return outcome;
}

inline double worst_error(const Outcome& outcome, const Reference& wanted) {
  double worst = 0;
  for (auto& gradients : outcome.gradients) worst = std::max(worst, worst_error(gradients, wanted.gradients));
  return worst;
}

}  // namespace isograd::toy
