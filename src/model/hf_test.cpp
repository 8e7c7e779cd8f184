// Hugging Face directories: round trips and bad ones. tests/test_hf.py compares with transformers itself.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "isograd/error.hpp"
#include "model/decoder_testing.hpp"
#include "model/hf_config.hpp"
#include "model/safetensors.hpp"

namespace isograd {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::HasSubstr;

std::string message_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

class HuggingFace : public ::testing::Test {
 protected:
  ~HuggingFace() override { fs::remove_all(folder_); }

  void write_weights(const std::map<std::string, at::Tensor>& tensors) {
    write_safetensors(folder_ / "model.safetensors", {tensors.begin(), tensors.end()});
  }
  // The error that reading gives.
  std::string error() {
    return message_of([&] { read_hf(folder_, at::kFloat); });
  }

  fs::path folder_ = fs::temp_directory_path() / ("isograd-hf-" + std::to_string(getpid()));
};

TEST_F(HuggingFace, WhatIsWrittenComesBack) {
  for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16})
    for (DecoderConfig config : small_configs()) {
      config.bos = 3, config.eos = 4, config.more_eos = {5, 6};
      DecoderLM model(config, type, 1);
      perturb(model, 2);
      write_hf(folder_, model);
      const auto back = read_hf(folder_, type);
      EXPECT_EQ(hf_config_text(back->config(), type), hf_config_text(config, type));
      const auto theirs = back->named(), ours = model.named();
      ASSERT_EQ(theirs.size(), ours.size());
      for (std::size_t i = 0; i < ours.size(); ++i) {
        EXPECT_EQ(theirs[i].first, ours[i].first);
        EXPECT_TRUE(theirs[i].second.equal(ours[i].second)) << ours[i].first;
        EXPECT_TRUE(theirs[i].second.requires_grad());
      }
    }
}

TEST_F(HuggingFace, ShardsAreReadAndTheirIndexIsChecked) {
  DecoderLM model(small_config("llama"), at::kFloat, 1);
  write_hf(folder_, model);
  auto tensors = read_safetensors(folder_ / "model.safetensors");
  for (auto& [name, tensor] : tensors) tensor = tensor.clone();
  fs::remove(folder_ / "model.safetensors");
  json map;
  std::vector<std::pair<std::string, at::Tensor>> parts[2];
  for (const auto& [name, tensor] : tensors) {
    const int part = static_cast<int>(map.size() % 2);
    parts[part].emplace_back(name, tensor);
    map[name] = fmt::format("part-{}.safetensors", part);
  }
  write_safetensors(folder_ / "part-0.safetensors", parts[0]);
  write_safetensors(folder_ / "part-1.safetensors", parts[1]);
  const auto index = [&](const json& weights) {
    write_file(folder_ / "model.safetensors.index.json", json{{"weight_map", weights}}.dump());
  };
  index(map);
  const auto back = read_hf(folder_, at::kFloat);
  for (const auto& [name, tensor] : back->named()) EXPECT_TRUE(tensor.equal(tensors.at(name))) << name;

  json broken = map;
  broken["model.norm.weight"] = "../part-0.safetensors";
  index(broken);
  EXPECT_THAT(error(), HasSubstr("the name of a file beside the index"));
  broken = map;
  broken["model.norm.weight"] =
      map["model.norm.weight"] == "part-0.safetensors" ? "part-1.safetensors" : "part-0.safetensors";
  index(broken);
  EXPECT_THAT(error(), HasSubstr("model.norm.weight"));
  broken = map;
  broken.erase("model.norm.weight");
  index(broken);
  EXPECT_THAT(error(), HasSubstr("a tensor that the index does not place here"));
  write_file(folder_ / "model.safetensors.index.json", "{}");
  EXPECT_THAT(error(), HasSubstr("no weight_map"));
  index(map);
  write_weights(tensors);
  EXPECT_THAT(error(), HasSubstr("both a whole file and an index"));
  EXPECT_THROW(write_hf(folder_, model), ConfigError);
}

TEST_F(HuggingFace, WeightsThatDoNotFitAreNamed) {
  DecoderLM model(small_config("llama"), at::kFloat, 1);
  write_hf(folder_, model);
  auto whole = read_safetensors(folder_ / "model.safetensors");
  for (auto& [name, tensor] : whole) tensor = tensor.clone();
  const std::string key = "model.layers.1.mlp.up_proj.weight";

  auto broken = whole;
  broken.erase(key);
  write_weights(broken);
  EXPECT_THAT(error(), AllOf(HasSubstr(key), HasSubstr("no such tensor")));
  broken = whole;
  broken["model.layers.1.mlp.up_proj.bias"] = at::ones({48});
  write_weights(broken);
  EXPECT_THAT(error(), AllOf(HasSubstr("up_proj.bias"), HasSubstr("no place for")));
  broken = whole;
  broken[key] = broken[key].t().contiguous();
  write_weights(broken);
  EXPECT_THAT(error(), AllOf(HasSubstr(key), HasSubstr("[32, 48]"), HasSubstr("[48, 32]")));
  broken = whole;
  broken[key] = broken[key].to(at::kChar);
  write_weights(broken);
  EXPECT_THAT(error(), AllOf(HasSubstr(key), HasSubstr("quantised")));
  broken = whole;
  broken["model.embed_tokens.weight"] = at::ones({60, 32});
  write_weights(broken);
  EXPECT_THAT(error(), AllOf(HasSubstr("60 rows"), HasSubstr("61, the vocab_size")));
  broken = whole;
  for (const auto& [name, tensor] : whole)
    if (name.starts_with("model.layers.1.")) broken.erase(name);
  write_weights(broken);
  EXPECT_THAT(error(), HasSubstr("weights of 1 layers"));
  broken = whole;
  broken["model.layers.0.self_attn.rotary_emb.inv_freq"] = at::ones({4});  // as old files have it
  write_weights(broken);
  EXPECT_EQ(error(), "no error");

  const std::string bytes = read_file(folder_ / "model.safetensors");
  write_file(folder_ / "model.safetensors", bytes.substr(0, bytes.size() - 5));
  EXPECT_THAT(error(), HasSubstr("model.safetensors"));
  fs::remove(folder_ / "model.safetensors");
  EXPECT_THAT(error(), HasSubstr("no weights"));
  fs::remove(folder_ / "config.json");
  EXPECT_THAT(error(), HasSubstr("config.json"));
}

TEST_F(HuggingFace, ATiedModelTakesACopyOfItsEmbeddingOnly) {
  DecoderConfig config = small_config("llama");
  config.tied_output = true;
  DecoderLM model(config, at::kFloat, 1);
  write_hf(folder_, model);
  auto whole = read_safetensors(folder_ / "model.safetensors");
  for (auto& [name, tensor] : whole) tensor = tensor.clone();
  whole["lm_head.weight"] = whole["model.embed_tokens.weight"];
  write_weights(whole);
  EXPECT_EQ(error(), "no error");
  whole["lm_head.weight"] = whole["lm_head.weight"] + 1;
  write_weights(whole);
  EXPECT_THAT(error(), HasSubstr("ties them"));
}

json base(const std::string& family) {
  return json::parse(hf_config_text(small_config(family), at::kFloat));
}

DecoderConfig parse(const json& object) {
  return parse_hf_config(object.dump(), "config.json");
}

// A key that changes the mathematics is refused by name; so is one that nobody knows.
TEST(HuggingFaceConfig, WhatIsNotSupportedIsRefusedByName) {
  struct Case {
    const char* family;
    const char* key;
    json value;
  };
  const json sliding = {"full_attention", "sliding_attention"};
  for (const auto& [family, key, value] : std::vector<Case>{
           {"llama", "model_type", "gemma"},
           {"llama", "hidden_act", "gelu"},
           {"llama", "attention_dropout", 0.1},
           {"llama", "partial_rotary_factor", 0.5},
           {"llama", "pretraining_tp", 2},
           {"llama", "quantization_config", {{"quant_method", "gptq"}}},
           {"llama", "sliding_window", 4096},
           {"llama", "layer_types", sliding},
           {"llama", "logits_scaling", 8.0},
           {"llama", "final_logit_softcapping", 30},
           {"llama", "residual_multiplier", 0.2},
           {"llama", "something_new", true},
           {"llama", "vocab_size", "61"},
           {"llama", "vocab_size", 61.5},
           {"llama", "vocab_size", nullptr},
           {"llama", "vocab_size", 1e300},
           {"llama", "hidden_size", -32},
           {"llama", "num_attention_heads", 0},
           {"llama", "rms_norm_eps", "small"},
           {"llama", "tie_word_embeddings", 1},
           {"llama", "eos_token_id", {2, "x"}},
           {"qwen2", "attention_bias", false},
           {"qwen2", "mlp_bias", true},
           {"qwen2", "layer_types", sliding},
           {"qwen3", "layer_types", {"full_attention"}},
           {"mistral", "attention_bias", true},
           {"mistral", "sliding_window", 63},
       }) {
    json object = base(family);
    object[key] = value;
    const std::string shown = std::string(key) == "hidden_size" ? "model.hidden" : key;
    EXPECT_THAT(message_of([&] { parse(object); }), AllOf(HasSubstr(shown), HasSubstr("config.json")))
        << family << " " << key << " " << value;
  }
  EXPECT_THAT(message_of([] { parse_hf_config("[1", "config.json"); }), HasSubstr("no JSON object"));
}

TEST(HuggingFaceConfig, SlidingWindowsThatNeverSlideAreAccepted) {
  json object = base("mistral");
  object["sliding_window"] = 64;  // max_position_embeddings
  EXPECT_EQ(parse(object).family, "mistral");
  object.erase("sliding_window");  // transformers' default, 4096
  EXPECT_EQ(parse(object).max_positions, 64);
  object["max_position_embeddings"] = 5000;
  EXPECT_THAT(message_of([&] { parse(object); }), HasSubstr("4096"));

  object = base("qwen2");
  object["sliding_window"] = 16;
  EXPECT_EQ(parse(object).family, "qwen2");  // not used
  object["use_sliding_window"] = true;
  EXPECT_EQ(parse(object).family, "qwen2");  // only from layer 28 on
  object["max_window_layers"] = 1;
  EXPECT_THAT(message_of([&] { parse(object); }), HasSubstr("sliding_window"));
  object["sliding_window"] = 64;
  EXPECT_EQ(parse(object).family, "qwen2");
}

TEST(HuggingFaceConfig, BothSpellingsOfRotaryScaling) {
  json object = base("llama");
  object.erase("rope_parameters");
  object["rope_theta"] = 500000.0;
  object["rope_scaling"] = {{"type", "linear"}, {"factor", 4.0}};
  DecoderConfig config = parse(object);
  EXPECT_EQ(config.rope_theta, 500000.0);
  EXPECT_EQ(config.rope_scaling.kind, "linear");
  EXPECT_EQ(config.rope_scaling.factor, 4.0);

  object = base("llama");
  object.erase("rope_theta"), object.erase("rope_scaling");
  object["rope_parameters"] = {{"rope_type", "yarn"}, {"rope_theta", 1e6},
                               {"factor", 2.0},       {"original_max_position_embeddings", 32},
                               {"mscale", 1.0},       {"mscale_all_dim", 0.5}};
  config = parse(object);
  EXPECT_EQ(config.rope_theta, 1e6);
  EXPECT_NEAR(*config.rope_scaling.attention_factor, (0.1 * std::log(2) + 1) / (0.05 * std::log(2) + 1),
              1e-15);

  object["rope_theta"] = 10000.0;
  EXPECT_THAT(message_of([&] { parse(object); }), HasSubstr("rope_parameters"));
  object.erase("rope_theta");
  for (const auto& [key, value] : std::vector<std::pair<std::string, json>>{{"rope_type", "longrope"},
                                                                            {"rope_type", "su"},
                                                                            {"partial_rotary_factor", 0.5},
                                                                            {"long_factor", {1, 2}},
                                                                            {"factor", 0.5},
                                                                            {"factor", "2"},
                                                                            {"beta_fast", 0.1},
                                                                            {"mrope_section", {1, 2}}}) {
    json broken = object;
    broken["rope_parameters"][key] = value;
    EXPECT_NE(message_of([&] { parse(broken); }), "no error") << key << " " << value;
  }
}

}  // namespace
}  // namespace isograd
