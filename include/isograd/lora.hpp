// Low-rank adapters of decoders (Hu et al. 2021, arXiv 2106.09685), as PEFT has them (src/lora).
#pragma once

#include "isograd/error.hpp"

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "isograd/model.hpp"

namespace isograd {

struct LoraConfig {
  std::int64_t rank = 32;
  double alpha = 32;  // scale = alpha / rank
  bool attention = true, mlp = true, unembed = true;  // q, k, v, o; gate, up, down; lm_head
  double dropout = 0;  // of the input of a, in training
};
// ConfigError: rank 1 to 512, alpha finite and > 0, nothing adapted, dropout outside [0, 1).
void check(const LoraConfig& config);

class LoraAdapter : public Adapter {
 public:
  // PEFT's initial values: a uniform in ±1/√in by (seed, parameter name), b zero. Leaves that require gradients.
  LoraAdapter(const DecoderConfig& model, const LoraConfig& config, at::ScalarType dtype, std::uint64_t seed);
  const LoraConfig& config() const { return config_; }
  // "model.layers.0.self_attn.q_proj.lora_A.weight", "...lora_B.weight", ..., "lm_head.lora_A.weight"; in the
  // model's order.
  const NamedTensors& named() const { return named_; }
  const LowRank* find(std::int64_t layer, Projection projection) const override;
  std::shared_ptr<LoraAdapter> copy() const;  // of the values as they are, without gradients

 private:
  LoraConfig config_;
  NamedTensors named_;
  std::vector<LowRank> updates_;  // by layer and projection; undefined: not adapted
};

// A directory as PEFT writes it: adapter_config.json, adapter_model.safetensors. `base`: base_model_name_or_path.
void write_peft(const std::filesystem::path& directory, const LoraAdapter& adapter, const DecoderConfig& model,
                const std::string& base);
// ConfigError: of another shape, a key that changes the mathematics and is not supported, damaged.
std::shared_ptr<LoraAdapter> read_peft(const std::filesystem::path& directory, const DecoderConfig& model,
                                       at::ScalarType dtype);
LoraConfig read_peft_config(const std::filesystem::path& directory);
// Adds scale · b a to the adapted matrices of the model.
void merge(DecoderLM& model, const LoraAdapter& adapter);

}  // namespace isograd
