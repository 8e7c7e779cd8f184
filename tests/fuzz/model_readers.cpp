// Weights, shapes of models, folders of both.
#include <ATen/ATen.h>

#include <cstring>

#include "base/files.hpp"
#include "base/json.hpp"
#include "fuzz/readers.hpp"
#include "isograd/model.hpp"
#include "model/decoder.hpp"
#include "model/hf.hpp"
#include "model/safetensors.hpp"
#include "train/evaluate.hpp"

namespace isograd::fuzz {
namespace {

namespace fs = std::filesystem;

std::string right_length(std::string file) {
  if (file.size() < 8) return file;
  const std::size_t end = file.rfind("}}");
  const std::uint64_t length = end == std::string::npos || end < 8 ? file.size() - 8 : end + 2 - 8;
  std::memcpy(file.data(), &length, 8);
  return file;
}

// Among the files of a model, JSON stays as it is.
std::string right_length_of_tensors(std::string file) {
  return file.starts_with('{') ? file : right_length(std::move(file));
}

void prepare_tensors(const fs::path& folder) {
  Tensors tensors{
      {"scalar", at::tensor(2.5)}, {"empty", at::empty({4, 0})}, {"odd", at::ones({3}, at::kByte)}};
  for (auto type : {at::kBool, at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf, at::kBFloat16,
                    at::kFloat, at::kDouble, at::kComplexFloat, at::kFloat8_e4m3fn})
    tensors.emplace_back(c10::toString(type), at::zeros({3, 2}, at::TensorOptions().dtype(type)));
  tensors.emplace_back("packed", at::empty({2, 2}, at::kFloat4_e2m1fn_x2));
  write_safetensors(folder / "types.safetensors", tensors, {{"format", "pt"}, {"note", "é"}});
  write_safetensors(folder / "one.safetensors", {{"w", at::ones({5, 7})}});
}

void read_tensors(const fs::path& file) {
  Metadata metadata;
  for (const auto& [name, tensor] : read_safetensors(file, &metadata)) look_at(tensor);
}

DecoderConfig tiny(const std::string& family) {
  DecoderConfig config;
  config.family = family;
  config.vocabulary = 11, config.hidden = 8, config.layers = 2, config.heads = 2, config.key_value_heads = 1;
  config.head_dim = 4, config.feed_forward = 6, config.max_positions = 32;
  config.attention_bias = family == "qwen2";
  config.query_key_norm = family == "qwen3";
  return config;
}

constexpr const char* kMixtures[] = {"mixtral", "qwen2_moe", "qwen3_moe"};

DecoderConfig tiny_mixture(const std::string& family) {
  DecoderConfig config = tiny(family == "mixtral" ? "mistral" : family == "qwen2_moe" ? "qwen2" : "qwen3");
  config.family = family;
  config.experts = {.count = 3, .per_token = 2, .feed_forward = 6};
  if (family == "qwen2_moe") config.experts.shared_feed_forward = 6;
  if (family != "mixtral") config.experts.dense_layers = {0};
  return config;
}

void prepare_model_configs(const fs::path& folder) {
  for (const char* family : {"llama", "qwen2", "qwen3", "mistral"}) {
    DecoderConfig config = tiny(family);
    put(folder / (std::string(family) + ".json"), hf_config_text(config, at::kFloat));
    for (const char* kind : {"linear", "dynamic", "llama3", "yarn"}) {
      config.rope_scaling = {.kind = kind, .factor = 4, .original_max_positions = 16};
      put(folder / (std::string(family) + "-" + kind + ".json"), hf_config_text(config, at::kFloat));
    }
    if (config.family == "llama") continue;
    config = tiny(family);
    config.sliding_window = 8, config.full_layers = config.family == "mistral" ? 0 : 1;
    put(folder / (std::string(family) + "-window.json"), hf_config_text(config, at::kFloat));
  }
  for (const char* family : kMixtures)
    put(folder / (std::string(family) + ".json"), hf_config_text(tiny_mixture(family), at::kFloat));
}

void read_model_config(const fs::path& file) {
  const DecoderConfig config = parse_hf_config(read_file(file), file);
  if (config.head_dim <= 1024) look_at(rotary_frequencies(config, 8, at::kDouble).first);
}

void prepare_models(const fs::path& folder) {
  for (const char* family : kMixtures) {
    DecoderLM mixture(tiny_mixture(family), at::kFloat, 1);
    write_hf(folder / family, mixture);
  }
  DecoderLM model(tiny("llama"), at::kFloat, 1);
  write_hf(folder / "whole", model);
  fs::create_directories(folder / "cut");
  fs::copy(folder / "whole/config.json", folder / "cut/config.json");
  Tensors parts[2];
  nlohmann::json map;
  for (const auto& [name, tensor] : model.named()) {
    const std::size_t part = map.size() % 2;
    parts[part].emplace_back(name, tensor);
    map[name] = "part-" + std::to_string(part) + ".safetensors";
  }
  for (std::size_t i = 0; i < 2; ++i)
    write_safetensors(folder / "cut" / ("part-" + std::to_string(i) + ".safetensors"), parts[i]);
  put(folder / "cut/model.safetensors.index.json", nlohmann::json{{"weight_map", map}}.dump());
}

void prepare_generation_configs(const fs::path& folder) {
  put(folder / "list.json",
      R"({"bos_token_id": 1, "eos_token_id": [2, 5], "temperature": 0.6, "do_sample": true})");
  put(folder / "one.json", R"({"eos_token_id": 2, "transformers_version": "5.0.0"})");
}

void read_generation_config(const fs::path& file) { (void)parse_generation_eos(read_file(file), file); }

void read_model(const fs::path& file) {
  const auto model = read_hf(file.parent_path(), at::kFloat);
  for (const auto& [name, tensor] : model->named()) look_at(tensor.detach());
}

void prepare_video_models(const fs::path& folder) {
  VideoDiTConfig shape;
  shape.patch_elements = 12, shape.hidden = 16, shape.layers = 2, shape.heads = 2, shape.feed_forward = 8;
  shape.timestep_features = 8, shape.max_frames = 2, shape.max_height = shape.max_width = 4;
  VideoDiT model(shape, at::kFloat, 1);
  write_video_model(folder, model.config(), stream_of(model.named()));
}

void read_video_folder(const fs::path& file) {
  const auto model = read_video_model(file.parent_path(), at::kFloat);
  for (const auto& [name, tensor] : model->named()) look_at(tensor.detach());
}

}  // namespace

std::vector<Reader> model_readers() {
  return {
      {"safetensors", prepare_tensors, read_tensors,
       with(kJson,
            {"\"dtype\"", "\"shape\":[", "\"data_offsets\":[0,0]", "__metadata__", "\"F4\"", "\"I64\""}),
       right_length},
      {"config.json", prepare_model_configs, read_model_config,
       with(kJson, {"\"rope_scaling\":", "\"rope_type\":\"yarn\"", "\"layer_types\":", "\"eos_token_id\":[",
                    "\"factor\":", "\"num_experts\":", "\"num_experts_per_tok\": 0", "\"sliding_window\":"})},
      {"generation_config.json", prepare_generation_configs, read_generation_config,
       with(kJson, {"\"eos_token_id\":[", "\"eos_token_id\": -1", "\"eos_token_id\": 1e99"})},
      {"model folder", prepare_models, read_model,
       with(kJson, {"\"weight_map\"", "../", "\"F16\"", "model.layers.9.", ".experts.9."})},
      {"video model", prepare_video_models, read_video_folder,
       with(kJson, {"\"layers\":", "\"heads\": 0", "\"patch_elements\": 4611686018427387904",
                    "\"feed_forward\": -1", "\"F16\"", "blocks.9."}),
       right_length_of_tensors},
  };
}

}  // namespace isograd::fuzz
