// config.json of Hugging Face directories: what is read, kept, accepted and refused. tests/test_hf.py
// compares with transformers itself.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "model/decoder_testing.hpp"
#include "model/hf.hpp"

namespace isograd {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

json base(const std::string& family) { return json::parse(hf_config_text(small_config(family), at::kFloat)); }

DecoderConfig parse(const json& object) { return parse_hf_config(object.dump(), "config.json"); }

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
           {"llama", "pretraining_tp", "two"},
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
           {"qwen3", "head_dim", nullptr},
           {"mistral", "attention_bias", true},
           {"mistral", "sliding_window", 0},
           {"mistral", "sliding_window", -1},
           {"mistral", "layer_types", sliding},
           {"mistral", "num_key_value_heads", nullptr},
           // transformers refuses null here.
           {"llama", "hidden_act", nullptr},
           {"llama", "rms_norm_eps", nullptr},
           {"llama", "rope_theta", nullptr},
           {"llama", "tie_word_embeddings", nullptr},
           {"llama", "attention_bias", nullptr},
           {"qwen2", "use_sliding_window", nullptr},
           {"qwen2", "max_window_layers", nullptr},
           {"llama", "pad_token_id", 61},
           {"llama", "pad_token_id", -62},
           {"llama", "pad_token_id", "x"},
           {"llama", "use_mrope", true},
           {"llama", "rope_interleaved", true},
       }) {
    json object = base(family);
    object[key] = value;
    EXPECT_THAT(message_of([&] { parse(object); }), AllOf(HasSubstr(key), HasSubstr("config.json")))
        << family << " " << key << " " << value;
  }
  EXPECT_THAT(message_of([] { parse_hf_config("[1", "config.json"); }), HasSubstr("no JSON object"));
  EXPECT_THAT(message_of([] { parse_hf_config("\xef\xbb\xbf{}", "config.json"); }),
              HasSubstr("byte order mark"));
}

json of_family(const std::string& family) {
  DecoderConfig config = small_config(family == "mixtral"     ? "mistral"
                                      : family == "qwen2_moe" ? "qwen2"
                                                              : "qwen3");
  config.family = family;
  config.experts = {.count = 4, .per_token = 2, .feed_forward = 8};
  if (family == "mixtral") config.experts.feed_forward = config.feed_forward;
  if (family == "qwen2_moe" || family == "dots1") config.experts.shared_feed_forward = 8;
  if (family == "dots1") config.experts.sigmoid = true;
  return json::parse(hf_config_text(config, at::kFloat));
}

// A message about a file has the file's names, not those of a run's configuration.
TEST(HuggingFaceConfig, MessagesNameTheKeysOfTheFile) {
  struct Case {
    const char* family;
    const char* key;
    json value;
    const char* expected = "";
  };
  for (const auto& [family, key, value, expected] : std::vector<Case>{
           {"dots1", "n_group", 3},
           {"dots1", "topk_group", 2},
           {"dots1", "routed_scaling_factor", -1},
           {"dots1", "n_routed_experts", 0},
           {"dots1", "num_experts_per_tok", 9},
           {"dots1", "moe_intermediate_size", 0},
           {"qwen2_moe", "num_experts", -1},
           {"qwen3_moe", "num_experts_per_tok", 9},
           {"qwen2_moe", "shared_expert_intermediate_size", 0},
           {"mixtral", "num_local_experts", 0},
           {"mixtral", "intermediate_size", 0},
           {"qwen3", "num_hidden_layers", 0},
           {"llama", "max_position_embeddings", 0},
           {"llama", "num_key_value_heads", 3},
           {"llama", "rms_norm_eps", 0},
           {"llama", "bos_token_id", -5},
           {"llama",
            "rope_parameters",
            {{"rope_type", "llama3"},
             {"factor", 2},
             {"low_freq_factor", 4},
             {"high_freq_factor", 1},
             {"original_max_position_embeddings", 16}},
            "low_freq_factor"},
       }) {
    json object = base("llama");
    if (family != std::string("llama"))
      object = family == std::string("qwen3") ? base(family) : of_family(family);
    parse(object);
    object[key] = value;
    const std::string shown =
        key == std::string("rope_parameters") ? "rope_scaling.high_freq_factor" : std::string(key);
    const std::string message = message_of([&] { parse(object); });
    EXPECT_THAT(message, AllOf(HasSubstr("config.json: " + shown + ":"), HasSubstr(expected),
                               Not(HasSubstr("model.")), Not(HasSubstr("_frequency_"))))
        << family << " " << key << " " << value;
  }
  json object = of_family("dots1");
  object["something_new"] = 1;
  EXPECT_THAT(message_of([&] { parse(object); }), HasSubstr("or dots1"));
}

// transformers has two names for the number of experts.
TEST(HuggingFaceConfig, TwoNamesOfTheExpertsMaySayTheSame) {
  for (const auto& [family, own, alias] : {std::tuple{"dots1", "n_routed_experts", "num_local_experts"},
                                           std::tuple{"qwen2_moe", "num_experts", "num_local_experts"},
                                           std::tuple{"qwen3_moe", "num_experts", "num_local_experts"},
                                           std::tuple{"mixtral", "num_local_experts", "num_experts"}}) {
    json object = of_family(family);
    object[alias] = 4;
    EXPECT_EQ(parse(object).experts.count, 4) << family;
    object[alias] = 5;
    EXPECT_THAT(message_of([&] { parse(object); }), AllOf(HasSubstr(own), HasSubstr(alias))) << family;
    object.erase(own);
    EXPECT_EQ(parse(object).experts.count, 5) << family;
  }
}

TEST(HuggingFaceConfig, WhatSaysNothingAboutTheMathematicsIsAccepted) {
  for (const char* family : {"llama", "qwen2", "qwen3", "mistral"}) {
    json object = base(family);
    object["is_llama_config"] = true;
    object["rope_interleaved"] = false;
    object["use_mrope"] = false;
    object["max_sequence_length"] = 2048;
    object["model_max_length"] = 16;
    object["pretraining_tp"] = 2;
    object["max_length"] = 4096;
    object["temperature"] = 0.9;
    object["transformers.js_config"] = {{"dtype", "q4"}};
    object["quantization_config"] = nullptr;
    object["attention_dropout"] = family == std::string("llama") ? json(nullptr) : json(0.0);
    if (family != std::string("mistral")) object["num_key_value_heads"] = nullptr;
    const DecoderConfig config = parse(object);
    EXPECT_EQ(config.key_value_heads, family == std::string("mistral") ? 2 : 4) << family;
  }
}

TEST(HuggingFaceConfig, APaddingTokenIsCountedFromTheEndWhereNegative) {
  json object = base("llama");
  EXPECT_EQ(parse(object).pad, -1);  // null
  object["pad_token_id"] = 5;
  EXPECT_EQ(parse(object).pad, 5);
  object["pad_token_id"] = -1;
  EXPECT_EQ(parse(object).pad, 60);
  object["pad_token_id"] = -61;
  EXPECT_EQ(parse(object).pad, 0);
}

TEST(HuggingFaceConfig, SlidingWindowsAreKept) {
  json object = base("mistral");
  EXPECT_EQ(parse(object).sliding_window, 0);  // null
  object["sliding_window"] = 16;
  EXPECT_EQ(parse(object).sliding_window, 16);
  object.erase("sliding_window");  // transformers' default
  EXPECT_EQ(parse(object).sliding_window, 4096);

  object = base("qwen2");
  object["sliding_window"] = 16;
  EXPECT_EQ(parse(object).sliding_window, 0);  // not used
  object["use_sliding_window"] = true;
  EXPECT_EQ(parse(object).sliding_window, 0);  // only from layer 28 on
  object["max_window_layers"] = 1;
  EXPECT_EQ(parse(object).sliding_window, 16);
  EXPECT_EQ(parse(object).full_layers, 1);
  object["layer_types"] = {"sliding_attention", "sliding_attention"};  // says more than max_window_layers
  EXPECT_EQ(parse(object).full_layers, 0);
  object["layer_types"] = {"full_attention", "full_attention"};
  EXPECT_EQ(parse(object).sliding_window, 0);
  object["layer_types"] = {"sliding_attention", "full_attention"};
  EXPECT_THAT(message_of([&] { parse(object); }), HasSubstr("layer_types"));
}

TEST(HuggingFaceConfig, ADocumentThatAWindowWouldCutIsRefused) {
  for (const char* family : {"mistral", "qwen2", "qwen3"}) {
    DecoderConfig config = small_config(family);
    DecoderLM plain(config, at::kDouble, 1);
    config.sliding_window = 16;
    DecoderLM model(config, at::kDouble, 1);
    const Batch fits = make_batch({16, 3, 16}, 61, 2);
    EXPECT_TRUE(model.logits(fits).equal(plain.logits(fits))) << family;
    EXPECT_THAT(message_of([&] {
                  model.logits(make_batch({3, 17}, 61, 2));
                }),
                AllOf(HasSubstr("a document of 17 tokens"), HasSubstr("16, the sliding window")));
  }
}

// test_hf.py compares what is accepted, in both spellings.
TEST(HuggingFaceConfig, RotaryScalingThatIsNotComputedIsRefused) {
  json object = base("llama");
  object.erase("rope_theta"), object.erase("rope_scaling");
  object["rope_parameters"] = {{"rope_type", "yarn"}, {"rope_theta", 1e6},
                               {"factor", 2.0},       {"original_max_position_embeddings", 32},
                               {"mscale", 1.0},       {"mscale_all_dim", 0.5}};
  EXPECT_EQ(parse(object).rope_theta, 1e6);
  // Without a base of its own rope_scaling means 10000, whatever rope_parameters says.
  json other = object;
  other["rope_scaling"] = object["rope_parameters"];
  other["rope_scaling"].erase("rope_theta");
  EXPECT_THAT(message_of([&] { parse(other); }),
              AllOf(HasSubstr("rope_parameters"), HasSubstr("(base 10000)"), HasSubstr("(base 1000000)")));
  json without = object;
  without["rope_parameters"].erase("factor");
  EXPECT_THAT(message_of([&] { parse(without); }), HasSubstr("rope_parameters.factor"));
  for (const auto& [key, value] :
       std::vector<std::pair<std::string, json>>{{"rope_type", "longrope"},
                                                 {"rope_type", "su"},
                                                 {"partial_rotary_factor", 0.5},
                                                 {"long_factor", {1, 2}},
                                                 {"factor", 0.5},
                                                 {"factor", "2"},
                                                 {"beta_fast", 0.1},
                                                 {"rope_type", nullptr},
                                                 {"rope_theta", nullptr},
                                                 {"original_max_position_embeddings", nullptr},
                                                 {"mrope_section", {1, 2}}}) {
    json broken = object;
    broken["rope_parameters"][key] = value;
    EXPECT_NE(message_of([&] { parse(broken); }), "no error") << key << " " << value;
  }
}

}  // namespace
}  // namespace isograd
