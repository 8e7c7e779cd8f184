// Weights that do not change: the bases, and what samplers draw from.
#pragma once

#include <filesystem>
#include <memory>

#include "isograd/data.hpp"
#include "isograd/lora.hpp"
#include "isograd/model.hpp"
#include "isograd/sampler.hpp"
#include "serve/models/datums.hpp"
#include "serve/service/engine.hpp"

namespace isograd::serve {

struct SampledModel {
  SampledModel(std::shared_ptr<DecoderLM> of, const TextSamplerOptions& options)
      : model(std::move(of)), sampler(*model, options) {}
  std::shared_ptr<DecoderLM> model;
  TextSampler sampler;
};

// A base: read once, frozen, shared by everything that is trained and sampled on it.
class Base {
 public:
  // ConfigError: as read_hf(). Without `values` its shape alone, for ranks that do not sample.
  Base(const std::string& name, const std::filesystem::path& directory, at::ScalarType dtype,
       const TextSamplerOptions& options, bool values = true);
  const DecoderConfig& shape() const { return sampled->model->config(); }
  const Tokenizer& tokenizer();  // opened at its first use. ConfigError: it has none

  BaseModel info;
  std::shared_ptr<SampledModel> sampled;

 private:
  std::unique_ptr<Tokenizer> tokenizer_;
};

// A model's weights as they were: an adapter over its base, a whole model, or the base itself.
struct FixedWeights {
  FixedWeights(std::shared_ptr<Base> of, std::shared_ptr<const LoraAdapter> low_rank,
               std::shared_ptr<SampledModel> whole = nullptr);
  ~FixedWeights() { sampled->sampler.forget(number); }
  FixedWeights(const FixedWeights&) = delete;
  FixedWeights& operator=(const FixedWeights&) = delete;

  std::shared_ptr<Base> base;
  std::shared_ptr<const LoraAdapter> adapter;  // null: none
  std::shared_ptr<SampledModel> sampled;       // the base's, unless the whole weights were trained
  std::uint64_t number;                        // of these weights, for the cache of prefixes
};

// isograd.json: what a directory has besides weights.
struct SavedModel {
  CreateModel created;
  std::string weights;  // "adapter", "whole", "base"
  // With Engine::Save::kTraining:
  bool training = false;
  std::string dtype;
  std::int64_t updates = 0;
  Counted open{};  // calls > 0: gradient.safetensors has the sums since the last step
};
void write_saved(const std::filesystem::path& directory, const SavedModel& saved);
SavedModel read_saved(const std::filesystem::path& directory);  // ConfigError: there is none, damaged

// As peft or transformers load them. `adapter` null: the whole model.
void write_weights(const std::filesystem::path& directory, const Base& base, const LoraAdapter* adapter,
                   DecoderLM& model);

}  // namespace isograd::serve
