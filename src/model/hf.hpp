// A Hugging Face directory: its config.json, and its weights tensor by tensor.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "isograd/model.hpp"
#include "model/safetensors.hpp"

namespace isograd {

inline constexpr const char* kGenerationConfig = "generation_config.json";

// `file` is for messages.
DecoderConfig parse_hf_config(const std::string& text, const std::filesystem::path& file);
// The tokens of eos_token_id in a generation_config.json, one or a list; nothing else of it is read.
std::vector<std::int64_t> parse_generation_eos(const std::string& text, const std::filesystem::path& file);
std::string hf_config_text(const DecoderConfig& config, at::ScalarType dtype);

// Experts' weights, and the matrices of their adapters, are stacked here ([experts, out, in]), gate and up
// apart. Files have a tensor for each expert.
bool is_stacked(const std::string& parameter);
// A parameter that is not stacked, or expert `expert` of one that is.
std::string name_in_file(const DecoderConfig& config, const std::string& parameter, std::int64_t expert = -1);
// Stacked tensors one expert after another, by the names of files.
TensorStream by_expert(const DecoderConfig& config, const TensorStream& weights);

// The files stay mapped: memory is taken by what is filled alone.
class HfWeights {
 public:
  // ConfigError as read_hf() has them, but for values that are not finite. `dtype`: that tensors are read in,
  // by which a tied output's copy is compared with the embedding.
  HfWeights(const std::filesystem::path& directory, at::ScalarType dtype);
  const DecoderConfig& config() const { return config_; }
  // Into a tensor of the parameter's shape, rounded to its type. ConfigError: not finite.
  void fill(const std::string& name, const at::Tensor& values) const;
  // A model of config()'s shape; the rest of its configuration is `config`.
  std::shared_ptr<DecoderLM> model(const DecoderConfig& config) const;

 private:
  const FoundTensor& fitting(const std::string& name, at::IntArrayRef shape) const;
  // A parameter as the files have it: whole, or one tensor for each expert. `names`: of what it is made from.
  std::vector<FoundTensor> parts(const std::string& parameter, at::IntArrayRef shape,
                                 std::set<std::string>* names = nullptr) const;

  std::filesystem::path directory_;
  DecoderConfig config_;
  at::ScalarType dtype_;
  std::map<std::string, FoundTensor> stored_;
};

}  // namespace isograd
