// Low-rank adapters of decoders (Hu et al. 2021, arXiv 2106.09685), as PEFT has them (src/lora).
#pragma once

#include "isograd/error.hpp"

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "isograd/model.hpp"

namespace isograd {

struct LoraConfig {
  std::int64_t rank = 32;
  double alpha = 32;                                  // scale = alpha / rank
  bool attention = true, mlp = true, unembed = true;  // q, k, v, o; gate, up, down; lm_head
  double dropout = 0;                                 // of the input of a, in training
  std::string base{};                                 // of read_peft_config(): base_model_name_or_path
  // PEFT's names of single matrices ("q_proj", "lm_head"). Not empty: these instead of the three groups.
  std::vector<std::string> modules{};

  bool adapts(Projection projection) const;
};
// ConfigError: rank 1 to 512, alpha finite and > 0, nothing adapted, dropout outside [0, 1), an unknown
// module.
void check(const LoraConfig& config);

// PEFT's initial values into zero-filled `values`: a uniform in ±1/√in by (seed, parameter name), b zero.
void initialize_lora(const std::string& name, at::Tensor& values, std::uint64_t seed);
// The matrix "model.layers.0.self_attn.q_proj.weight" that a parameter of an adapter updates; empty: it is no
// such.
std::string adapted_matrix(const std::string& name);

// x [T, features] with some set to 0 and the others divided by what is left, by (seed, batch.draw, sample,
// layer and projection, position, feature): ranks with parts of the batch or of the features drop the same.
struct LoraDropout {
  double fraction = 0;
  std::uint64_t seed = 0;
  std::int64_t first = 0, width = 0;  // the features of x are [first, first + x.size(1)) of width
};
at::Tensor drop_inputs(const at::Tensor& x, const Batch& batch, std::int64_t layer, Projection projection,
                       const LoraDropout& dropout);

class LoraAdapter : public Adapter {
 public:
  // Leaves that require gradients, with initial values. ConfigError: experts with dropout, or with some of
  // their matrices.
  LoraAdapter(const DecoderConfig& model, const LoraConfig& config, at::ScalarType dtype, std::uint64_t seed);
  // On the meta device, for a layout that gives each rank its part.
  static std::shared_ptr<LoraAdapter> without_values(const DecoderConfig& model, const LoraConfig& config,
                                                     at::ScalarType dtype);
  const LoraConfig& config() const { return config_; }
  // "model.layers.0.self_attn.q_proj.lora_A.weight", "...lora_B.weight", ..., "lm_head.lora_A.weight"; in the
  // model's order. All experts of a layer: "model.layers.0.mlp.experts.gate_proj.lora_A.weight", ...
  const NamedTensors& named() const { return named_; }
  const LowRank* find(std::int64_t layer, Projection projection) const override;
  std::shared_ptr<LoraAdapter> copy() const;  // of the values as they are, without gradients

 private:
  LoraAdapter(const DecoderConfig& model, const LoraConfig& config, const at::TensorOptions& options);

  LoraConfig config_;
  NamedTensors named_;
  std::map<std::pair<std::int64_t, Projection>, LowRank> updates_;  // by layer
};

// A directory as PEFT writes it: adapter_config.json, adapter_model.safetensors. `base`:
// base_model_name_or_path.
void write_peft(const std::filesystem::path& directory, const LoraAdapter& adapter,
                const DecoderConfig& model, const std::string& base);
// For a stream with an adapter's names.
void write_peft(const std::filesystem::path& directory, const LoraConfig& config, const DecoderConfig& model,
                const TensorStream& values, const std::string& base);
// ConfigError: of another shape, a key that changes the mathematics and is not supported, damaged.
std::shared_ptr<LoraAdapter> read_peft(const std::filesystem::path& directory, const DecoderConfig& model,
                                       at::ScalarType dtype);
LoraConfig read_peft_config(const std::filesystem::path& directory);
// Adds scale · b a to the adapted matrices of the model. ConfigError: an update of the head where it is tied.
void merge(DecoderLM& model, const LoraAdapter& adapter);

}  // namespace isograd
