// Hugging Face directories: round trips and bad ones. tests/test_hf.py compares with transformers itself.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "isograd/error.hpp"
#include "model/decoder_testing.hpp"
#include "model/hf.hpp"
#include "model/safetensors.hpp"

namespace isograd {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::HasSubstr;

class HuggingFace : public ::testing::Test {
 protected:
  ~HuggingFace() override { fs::remove_all(folder_); }

  void write_weights(const std::map<std::string, at::Tensor>& tensors) {
    write_safetensors(folder_ / "model.safetensors", {tensors.begin(), tensors.end()});
  }
  // The tensors of a written model, by name.
  std::map<std::string, at::Tensor> written(DecoderLM& model) {
    write_hf(folder_, model);
    auto tensors = read_safetensors(folder_ / "model.safetensors");
    for (auto& [name, tensor] : tensors) tensor = tensor.clone();
    return tensors;
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
      config.bos = 3, config.eos = 4, config.more_eos = {5, 6}, config.pad = 7;
      if (config.family != "llama") config.sliding_window = 40;
      if (config.family.starts_with("qwen")) config.full_layers = 1;
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
  const auto tensors = written(model);
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
  EXPECT_THAT(error(), HasSubstr("the name of a file next to the index"));
  broken = map;
  broken["model.norm.weight"] =
      map["model.norm.weight"] == "part-0.safetensors" ? "part-1.safetensors" : "part-0.safetensors";
  index(broken);
  EXPECT_THAT(error(), HasSubstr("model.norm.weight"));
  broken = map;
  broken.erase("model.norm.weight");
  index(broken);
  EXPECT_THAT(error(), HasSubstr("a tensor that the index does not place here"));
  write_file(folder_ / "model.safetensors.index.json", "\xef\xbb\xbf" + json{{"weight_map", map}}.dump());
  EXPECT_THAT(error(), HasSubstr("byte order mark"));
  write_file(folder_ / "model.safetensors.index.json", "{}");
  EXPECT_THAT(error(), HasSubstr("no weight_map"));
  index(map);
  write_weights(tensors);
  EXPECT_THAT(error(), HasSubstr("both a whole file and an index"));
  EXPECT_THROW(write_hf(folder_, model), ConfigError);
}

TEST_F(HuggingFace, LargeModelsAreWrittenAsSeveralFiles) {
  DecoderLM model(small_config("qwen3"), at::kFloat, 1);
  perturb(model, 2);
  std::int64_t largest = 0, total = 0;
  for (const auto& [name, tensor] : model.named())
    largest = std::max<std::int64_t>(largest, tensor.nbytes()),
    total += static_cast<std::int64_t>(tensor.nbytes());
  for (const std::int64_t limit : {std::int64_t{1}, largest, 2 * largest + 1}) {
    const fs::path folder = folder_ / std::to_string(limit);
    write_hf(folder, model.config(), stream_of(model.named()), limit);
    EXPECT_FALSE(fs::exists(folder / "model.safetensors"));
    const json index = json::parse(read_file(folder / "model.safetensors.index.json"));
    EXPECT_EQ(index["metadata"]["total_size"], total);
    EXPECT_EQ(index["weight_map"].size(), model.named().size());
    std::size_t files = 0;
    for (const auto& entry : fs::directory_iterator(folder)) {
      if (entry.path().extension() != ".safetensors") continue;
      ++files;
      std::int64_t bytes = 0;
      const auto tensors = read_safetensors(entry.path());
      for (const auto& [name, tensor] : tensors) bytes += static_cast<std::int64_t>(tensor.nbytes());
      EXPECT_TRUE(bytes <= limit || tensors.size() == 1) << entry.path();
    }
    EXPECT_GT(files, 1u);
    EXPECT_TRUE(fs::exists(folder / fmt::format("model-{:05}-of-{:05}.safetensors", files, files)));
    const auto back = read_hf(folder, at::kFloat);
    for (std::size_t i = 0; i < model.named().size(); ++i)
      EXPECT_TRUE(back->named()[i].second.equal(model.named()[i].second)) << model.named()[i].first;
  }
  // Only one of the two forms is written.
  const fs::path folder = folder_ / "whole";
  write_hf(folder, model);
  EXPECT_THROW(write_hf(folder, model.config(), stream_of(model.named()), 1), ConfigError);
}

TEST_F(HuggingFace, WeightsThatDoNotFitAreNamed) {
  DecoderLM model(small_config("llama"), at::kFloat, 1);
  const auto whole = written(model);
  const std::string key = "model.layers.1.mlp.up_proj.weight";

  using Tensors = std::map<std::string, at::Tensor>;
  struct Case {
    std::function<void(Tensors&)> plant;
    std::vector<std::string> found;
  };
  for (const auto& [plant, found] : std::vector<Case>{
           {[&](Tensors& of) { of.erase(key); }, {key, "no such tensor"}},
           {[](Tensors& of) { of["model.layers.1.mlp.up_proj.bias"] = at::ones({48}); },
            {"up_proj.bias", "no place for"}},
           {[&](Tensors& of) { of[key] = of[key].t().contiguous(); }, {key, "[32, 48]", "[48, 32]"}},
           {[&](Tensors& of) { of[key] = of[key].to(at::kChar); }, {key, "quantised"}},
           {[](Tensors& of) {
              of["model.embed_tokens.weight"] = at::ones({60, 32});
            },
            {"60 rows", "61, the vocab_size"}},
           {[](Tensors& of) {
              std::erase_if(of, [](auto& one) { return one.first.starts_with("model.layers.1."); });
            },
            {"model.layers.1.input_layernorm.weight", "weights of 1 layers"}},
           {[&](Tensors& of) { of["model.layers.2.mlp.up_proj.weight"] = of[key]; },
            {"model.layers.2.mlp.up_proj.weight", "weights of 3 layers"}},
           {[&](Tensors& of) { of["model.layers.99999999999999999999.mlp.up_proj.weight"] = of[key]; },
            {"model.layers.99999999999999999999.mlp.up_proj.weight"}},
           // As old files have it.
           {[](Tensors& of) { of["model.layers.0.self_attn.rotary_emb.inv_freq"] = at::ones({4}); },
            {"no error"}}}) {
    Tensors broken = whole;
    plant(broken);
    write_weights(broken);
    for (const std::string& text : found) EXPECT_THAT(error(), HasSubstr(text));
  }

  const std::string bytes = read_file(folder_ / "model.safetensors");
  write_file(folder_ / "model.safetensors", bytes.substr(0, bytes.size() - 5));
  EXPECT_THAT(error(), HasSubstr("model.safetensors"));
  fs::remove(folder_ / "model.safetensors");
  EXPECT_THAT(error(), HasSubstr("no weights"));
  fs::remove(folder_ / "config.json");
  EXPECT_THAT(error(), HasSubstr("config.json"));
}

TEST_F(HuggingFace, WeightsThatAreNotFiniteAreNamed) {
  DecoderLM model(small_config("llama"), at::kFloat, 1);
  const auto whole = written(model);
  const std::string key = "model.layers.1.mlp.up_proj.weight";
  for (const double value : {std::nan(""), -std::numeric_limits<double>::infinity()}) {
    auto broken = whole;
    broken[key] = whole.at(key).clone();
    broken[key][3][5] = value, broken[key][4][0] = value;
    write_weights(broken);
    EXPECT_THAT(error(), AllOf(HasSubstr(key), HasSubstr("2 of 1536 values that are not finite"),
                               HasSubstr("[3, 5]")));
  }
  // Finite in the file, but not in the run's type.
  auto wide = whole;
  wide[key] = whole.at(key).to(at::kDouble);
  wide[key][0][0] = 1e300;
  write_weights(wide);
  EXPECT_THAT(error(), AllOf(HasSubstr(key), HasSubstr("not finite as Float")));
  EXPECT_EQ(message_of([&] { read_hf(folder_, at::kDouble); }), "no error");
}

TEST_F(HuggingFace, ATiedModelTakesACopyOfItsEmbeddingOnly) {
  DecoderConfig config = small_config("llama");
  config.tied_output = true;
  DecoderLM model(config, at::kFloat, 1);
  auto whole = written(model);
  whole["lm_head.weight"] = whole["model.embed_tokens.weight"];
  write_weights(whole);
  EXPECT_EQ(error(), "no error");
  whole["lm_head.weight"] = whole["lm_head.weight"] + 1;
  write_weights(whole);
  EXPECT_THAT(error(), HasSubstr("ties them"));
}

}  // namespace
}  // namespace isograd
