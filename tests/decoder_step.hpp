// A small decoder, uneven micro-batches for it, and the reference: one process, a whole model, the whole
// batch, LibTorch's log_softmax. The reference shares the model's forward with what is tested, and nothing
// else.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "base/error_testing.hpp"
#include "isograd/fully_shard.hpp"
#include "isograd/loss.hpp"
#include "isograd/model.hpp"
#include "isograd/optimizer.hpp"
#include "isograd/step.hpp"
#include "isograd/tensor_parallel.hpp"
#include "model/decoder_testing.hpp"
#include "parallel/data/strategies_testing.hpp"
#include "train/build.hpp"

namespace isograd::tensor {

// Sizes that no number of ranks divides: vocabulary 257, features 89.
inline DecoderConfig shape(std::int64_t heads, std::int64_t key_heads, bool tied) {
  DecoderConfig config = small_config("qwen3");  // norms of queries and keys
  config.vocabulary = 257, config.hidden = 12, config.layers = 2, config.heads = heads;
  config.key_value_heads = key_heads, config.head_dim = 4, config.feed_forward = 89,
  config.tied_output = tied;
  config.pad = 3;
  return config;
}

inline DecoderConfig shape_with_experts(std::int64_t experts, std::int64_t shared_feed_forward = 0) {
  DecoderConfig config = small_config("qwen3");
  config.family = shared_feed_forward > 0 ? "qwen2_moe" : "qwen3_moe";
  config.query_key_norm = shared_feed_forward == 0, config.attention_bias = shared_feed_forward > 0;
  config.vocabulary = 31, config.hidden = 12, config.heads = 4, config.key_value_heads = 2;
  config.head_dim = 4, config.feed_forward = 20;
  config.experts = {
      .count = experts, .per_token = 2, .feed_forward = 7, .shared_feed_forward = shared_feed_forward};
  return config;
}

// Data of rank `place` of `places`: uneven micro-batches, some without a target, fewer on the last one.
inline MicroBatches step_of(int place, int places, std::int64_t vocabulary, int accumulation = 3) {
  MicroBatches batches;
  const int count = place + 1 == places && places > 1 ? 1 : accumulation;
  for (int i = 0; i < count; ++i) {
    const auto seed = static_cast<std::uint64_t>(100 * place + i);
    const std::vector<std::int64_t> lengths =
        i == 1 ? std::vector<std::int64_t>{1} : std::vector<std::int64_t>{7 + place, 3, 11 - i % 11};
    Batch batch = make_batch(lengths, vocabulary, seed);
    batch.targets = batch.tokens.roll(-1);
    for (std::size_t f = 0; f + 1 < batch.cu_seqlens.size(); ++f) {
      batch.targets[batch.cu_seqlens[f + 1] - 1] = kIgnoreIndex;
      batch.sample_ids[f] = 1000 * place + 10 * i + static_cast<std::int64_t>(f);
      batch.sample_targets.push_back(lengths[f] - 1);
    }
    batches.push_back(batch);
  }
  return batches;
}

inline std::shared_ptr<DecoderLM> whole_model(const DecoderConfig& config, at::ScalarType type) {
  DecoderLM first(config, at::kDouble, 7);
  perturb(first, 8);
  auto model = std::make_shared<DecoderLM>(config, type, 7);
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < first.named().size(); ++i)  // the same numbers in every precision
    model->named()[i].second.copy_(first.named()[i].second.to(at::kBFloat16));
  return model;
}

struct Gradient {
  std::map<std::string, at::Tensor> of;
  double loss = 0;
  double norm() const {
    double squares = 0;
    for (const auto& [name, tensor] : of) squares += tensor.to(at::kDouble).square().sum().item<double>();
    return std::sqrt(squares);
  }
};

// Σ over tokens / their number, or the mean over samples of each one's mean: of what all of `places` have.
inline Gradient one_process(DecoderLM& model, int places, int accumulation, Mean mean) {
  const std::int64_t vocabulary = model.config().vocabulary;
  double targets = 0, samples = 0;
  for (int place = 0; place < places; ++place)
    for (const Batch& batch : step_of(place, places, vocabulary, accumulation))
      for (const std::int64_t count : batch.sample_targets) targets += double(count), samples += count > 0;
  Gradient result;
  for (int place = 0; place < places; ++place)
    for (const Batch& batch : step_of(place, places, vocabulary, accumulation)) {
      const at::Tensor log_p = at::log_softmax(model.logits(batch).to(at::kDouble), 1);
      at::Tensor weights = at::zeros({batch.num_tokens()}, at::kDouble);
      for (std::size_t f = 0; f + 1 < batch.cu_seqlens.size(); ++f) {
        const double own = mean == Mean::kTargets ? 1 / targets
                           : batch.sample_targets[f] > 0
                               ? 1 / (samples * static_cast<double>(batch.sample_targets[f]))
                               : 0;
        weights.slice(0, batch.cu_seqlens[f], batch.cu_seqlens[f + 1]).fill_(own);
      }
      weights.masked_fill_(batch.targets.eq(kIgnoreIndex), 0);
      const at::Tensor loss =
          -(log_p.gather(1, batch.targets.clamp_min(0).unsqueeze(1)).squeeze(1) * weights).sum();
      result.loss += loss.item<double>();
      if (loss.requires_grad()) loss.backward();
    }
  for (auto& [name, tensor] : model.named())
    if (tensor.requires_grad()) {
      if (!tensor.grad().defined())
        ADD_FAILURE() << "no gradient of " << name;
      else
        result.of[name] = tensor.grad().clone();
    }
  return result;
}

inline std::unique_ptr<Normalizer> normalizer_of(Mean mean) {
  if (mean == Mean::kSamples) return std::make_unique<SampleMean>();
  return std::make_unique<TokenMean>();
}

// ‖g − g64‖ / ‖g64‖ by parameter.
inline std::map<std::string, double> errors(const Gradient& found, const Gradient& wanted) {
  std::map<std::string, double> result;
  for (const auto& [name, gradient] : wanted.of) {
    const at::Tensor exact = gradient.to(at::kDouble);
    const double error = (found.of.at(name).to(at::kDouble) - exact).norm().item<double>();
    result[name] = std::isnan(error) ? HUGE_VAL : error / exact.norm().item<double>();
  }
  return result;
}

inline double largest_error(const Gradient& found, const Gradient& wanted) {
  double largest = 0;
  for (const auto& [name, error] : errors(found, wanted)) largest = std::max(largest, error);
  return largest;
}

}  // namespace isograd::tensor
