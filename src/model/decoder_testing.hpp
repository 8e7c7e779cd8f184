// Small models and batches for tests.
#pragma once

#include <functional>
#include <string>

#include "base/error_testing.hpp"
#include "isograd/model.hpp"
#include "isograd/random.hpp"

namespace isograd {

inline DecoderConfig small_config(const std::string& family) {
  DecoderConfig config;
  config.family = family;
  config.vocabulary = 61, config.hidden = 32, config.layers = 2, config.heads = 4, config.key_value_heads = 2;
  config.head_dim = 8, config.feed_forward = 48, config.max_positions = 64, config.initializer_range = 0.3;
  config.attention_bias = family == "qwen2";
  config.query_key_norm = family == "qwen3";
  return config;
}

// Every family, every rotary scaling, and what Llama may switch on.
inline std::vector<DecoderConfig> small_configs() {
  std::vector<DecoderConfig> configs;
  for (const char* family : {"llama", "qwen2", "qwen3", "mistral"}) configs.push_back(small_config(family));
  DecoderConfig biased = small_config("llama");
  biased.attention_bias = biased.output_bias = biased.mlp_bias = biased.tied_output = true;
  biased.key_value_heads = 4;
  configs.push_back(biased);
  for (const RopeScaling& scaling :
       {RopeScaling{.kind = "linear", .factor = 2}, RopeScaling{.kind = "dynamic", .factor = 2},
        RopeScaling{.kind = "llama3",
        .factor = 8,
        .low_frequency_factor = 1,
        .high_frequency_factor = 4,
        .original_max_positions = 32},
        RopeScaling{.kind = "yarn", .factor = 4, .original_max_positions = 16}}) {
    configs.push_back(small_config("llama"));
    configs.back().rope_scaling = scaling;
  }
  return configs;
}

// Fragments of the given lengths with random tokens.
inline Batch make_batch(const std::vector<std::int64_t>& lengths, std::int64_t vocabulary,
                        std::uint64_t seed) {
  std::vector<std::int64_t> tokens, positions;
  Batch batch;
  for (std::size_t f = 0; f < lengths.size(); ++f) {
    for (std::int64_t i = 0; i < lengths[f]; ++i) {
      const RandomKey key{.seed = seed, .sample = f};
      tokens.push_back(static_cast<std::int64_t>(random_bits(key, static_cast<std::uint64_t>(i)) %
                                                 static_cast<std::uint64_t>(vocabulary)));
      positions.push_back(i);
    }
    batch.cu_seqlens.push_back(batch.cu_seqlens.back() + lengths[f]);
    batch.sample_ids.push_back(static_cast<std::int64_t>(f));
  }
  batch.tokens = at::tensor(tokens, at::kLong);
  batch.positions = at::tensor(positions, at::kLong);
  return batch;
}

// Norms and biases away from one and zero, so that leaving one out cannot pass.
inline void perturb(DecoderLM& model, std::uint64_t seed) {
  const at::NoGradGuard no_grad;
  for (auto& [name, tensor] : model.named()) {
    if (tensor.dim() != 1) continue;
    const RandomKey key{.seed = seed, .layer = hash_name(name)};
    for (std::int64_t i = 0; i < tensor.numel(); ++i)
      tensor[i] += 0.3 * random_normal(key, static_cast<std::uint64_t>(i));
  }
}

inline std::string message_of(const std::function<void()>& work) { return error_testing::error_of(work); }

}  // namespace isograd
