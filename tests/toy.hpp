// A small model with every kind of parameter that data parallelism must get right, uneven batches for it, and
// the reference: one process, the whole batch, LibTorch's own mean. The reference shares no code with what is
// tested.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "isograd/batch.hpp"

namespace isograd::toy {

inline constexpr std::int64_t kVocabulary = 13, kHidden = 7;  // odd: no size is a multiple of a rank count

// Embedding tied with the output, a matrix used twice, a parameter of one element, one that only some batches
// use, one that none uses, one that is frozen.
struct Model {
  at::Tensor embedding, twice, bias, gain, sometimes, unused, frozen;

  explicit Model(at::ScalarType type = at::kDouble) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(11);
    const auto make = [&](at::IntArrayRef shape) {
      return (at::randn(shape, generator, at::TensorOptions(at::kDouble)) * 0.4)
          .to(type)
          .requires_grad_(true);
    };
    embedding = make({kVocabulary, kHidden});
    twice = make({kHidden, kHidden});
    bias = make({kHidden});
    gain = make({1});
    sometimes = make({kHidden});
    unused = make({3, 5});
    frozen = make({kHidden}).detach();
  }

  std::vector<std::pair<std::string, at::Tensor>> named() const {
    return {{"embedding", embedding}, {"twice", twice},         {"bias", bias},     {"frozen", frozen},
            {"gain", gain},           {"sometimes", sometimes}, {"unused", unused}, {"output", embedding}};
  }
  std::vector<at::Tensor> trainable() const { return {embedding, twice, bias, gain, sometimes, unused}; }

  // [T, kVocabulary]. A token sees the mean of its fragment up to itself, so that packing matters.
  at::Tensor logits(const Batch& batch) const {
    const std::int64_t length = batch.num_tokens();
    at::Tensor mix = at::zeros({length, length}, at::kDouble), odd = at::zeros({length, 1}, at::kDouble);
    for (std::int64_t f = 0; f < batch.num_fragments(); ++f)
      for (std::int64_t i = batch.cu_seqlens[f]; i < batch.cu_seqlens[f + 1]; ++i) {
        const std::int64_t begin = batch.cu_seqlens[f], seen = i + 1 - begin;
        mix[i].narrow(0, begin, seen).fill_(1.0 / static_cast<double>(seen));
        odd[i] = batch.sample_ids[f] % 2;
      }
    const auto type = embedding.scalar_type();
    at::Tensor x = at::embedding(embedding, batch.tokens) + frozen;
    x = x + at::matmul(mix.to(type), x);
    x = at::tanh(at::linear(x, twice, bias));
    x = at::tanh(at::linear(x, twice)) * gain;
    if (odd.sum().item<double>() > 0) x = x + odd.to(type) * sometimes;
    return at::linear(x, embedding);
  }
};

// Fragments of these lengths; sample ids count up from `first_sample`. `silent`: no target carries loss.
inline Batch make_batch(const std::vector<std::int64_t>& lengths, std::int64_t first_sample,
                        bool silent = false) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(1000 + first_sample);
  Batch batch;
  std::vector<at::Tensor> tokens, targets, positions;
  for (std::int64_t length : lengths) {
    const at::Tensor text =
        at::randint(0, kVocabulary, {length + 1}, generator, at::TensorOptions(at::kLong));
    at::Tensor next = text.narrow(0, 1, length).clone();
    next[length - 1] = kIgnoreIndex;
    if (length > 4) next[2] = kIgnoreIndex;
    if (silent) next.fill_(kIgnoreIndex);
    tokens.push_back(text.narrow(0, 0, length));
    targets.push_back(next);
    positions.push_back(at::arange(length));
    batch.cu_seqlens.push_back(batch.cu_seqlens.back() + length);
    batch.sample_ids.push_back(first_sample++);
    batch.sample_targets.push_back(next.ne(kIgnoreIndex).sum().item<std::int64_t>());
  }
  const auto join = [](const std::vector<at::Tensor>& parts) {
    return parts.empty() ? at::empty({0}, at::kLong) : at::cat(parts);
  };
  batch.tokens = join(tokens);
  batch.targets = join(targets);
  batch.positions = join(positions);
  return batch;
}

// Every rank's micro-batches of one step: packed, uneven; from three ranks on the second rank has none; one
// micro-batch is empty and one has no target.
inline std::vector<MicroBatches> make_step(int ranks, int accumulation, std::int64_t seed = 0) {
  std::vector<MicroBatches> by_rank(ranks);
  std::int64_t sample = 100 * seed;
  for (int rank = 0; rank < ranks; ++rank) {
    if (ranks >= 3 && rank == 1) continue;
    for (int i = 0; i < accumulation; ++i) {
      std::vector<std::int64_t> lengths = {3 + (5 * rank + 3 * i + seed) % 8};
      if ((rank + i) % 2 == 0) lengths.push_back(2 + 7 * rank % 12);
      if (rank == ranks - 1) lengths = {21 + 3 * i};
      by_rank[rank].push_back(make_batch(lengths, sample, rank == 0 && i == 2));
      sample += static_cast<std::int64_t>(lengths.size());
    }
  }
  by_rank[0].insert(by_rank[0].begin(), make_batch({}, 0));
  return by_rank;
}

inline Batch concatenate(const std::vector<MicroBatches>& by_rank) {
  Batch whole;
  std::vector<at::Tensor> tokens, targets, positions;
  for (const MicroBatches& micro_batches : by_rank)
    for (const Batch& batch : micro_batches) {
      const std::int64_t offset = whole.cu_seqlens.back();
      tokens.push_back(batch.tokens);
      targets.push_back(batch.targets);
      positions.push_back(batch.positions);
      for (std::size_t f = 0; f < batch.sample_ids.size(); ++f) {
        whole.cu_seqlens.push_back(offset + batch.cu_seqlens[f + 1]);
        whole.sample_ids.push_back(batch.sample_ids[f]);
        whole.sample_targets.push_back(batch.sample_targets[f]);
      }
    }
  whole.tokens = at::cat(tokens);
  whole.targets = at::cat(targets);
  whole.positions = at::cat(positions);
  return whole;
}

struct Reference {
  double loss = 0;
  std::vector<at::Tensor> gradients;  // of Model::trainable(), zeros where unused
};

inline Reference reference(const Model& model, const std::vector<MicroBatches>& by_rank) {
  const Batch whole = concatenate(by_rank);
  const at::Tensor loss =
      at::cross_entropy_loss(model.logits(whole), whole.targets, {}, at::Reduction::Mean, kIgnoreIndex);
  Reference result;
  result.loss = loss.item<double>();
  const auto parameters = model.trainable();
  result.gradients = torch::autograd::grad({loss}, parameters, {}, false, false, /*allow_unused=*/true);
  for (std::size_t i = 0; i < parameters.size(); ++i)
    if (!result.gradients[i].defined()) result.gradients[i] = at::zeros_like(parameters[i].detach());
  return result;
}

// Largest ‖g − g64‖ / s over the parameters, s = max(‖g64‖, 1e-3 · RMS · √numel).
inline double worst_error(const std::vector<at::Tensor>& gradients, const std::vector<at::Tensor>& wanted) {
  double squares = 0, worst = 0;
  std::int64_t count = 0;
  for (const at::Tensor& g : wanted) {
    squares += g.square().sum().item<double>();
    count += g.numel();
  }
  const double rms = std::sqrt(squares / static_cast<double>(count));
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const double scale = std::max(wanted[i].norm().item<double>(),
                                  1e-3 * rms * std::sqrt(static_cast<double>(wanted[i].numel())));
    const double error = (gradients[i].to(at::kDouble) - wanted[i]).norm().item<double>() / scale;
    worst = std::isfinite(error) ? std::max(worst, error) : HUGE_VAL;
  }
  return worst;
}

}  // namespace isograd::toy
