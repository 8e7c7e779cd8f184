#include "model/hf_config.hpp"

#include <cmath>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "isograd/error.hpp"
#include "model/json_reader.hpp"

namespace isograd {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

// Keys that say how a model was made, stored or is used, and nothing about what it computes.
const std::set<std::string> kHarmless = {"_name_or_path",
                                         "name_or_path",
                                         "architectures",
                                         "transformers_version",
                                         "torch_dtype",
                                         "dtype",
                                         "use_cache",
                                         "pad_token_id",
                                         "return_dict",
                                         "output_attentions",
                                         "output_hidden_states",
                                         "id2label",
                                         "label2id",
                                         "problem_type",
                                         "chunk_size_feed_forward",
                                         "_commit_hash",
                                         "_attn_implementation",
                                         "attn_implementation",
                                         "tokenizer_class"};

bool is_qwen(const std::string& family) {
  return family == "qwen2" || family == "qwen3";
}

void read_scaling(const json& object, const std::string& where, DecoderConfig& config) {
  if (!object.is_object())
    throw ConfigError({.where = where,
                       .found = brief(object),
                       .expected = "an object or null",
                       .action = "Correct config.json"});
  JsonReader reader(object, where + ".");
  RopeScaling& scaling = config.rope_scaling;
  const std::string old_kind = reader.text("type", "default");
  scaling = {};
  scaling.kind = reader.text("rope_type", old_kind);
  if (const std::string& kind = scaling.kind;
      kind != "default" && kind != "linear" && kind != "dynamic" && kind != "llama3" && kind != "yarn")
    reader.bad("rope_type", kind, "default, linear, dynamic, llama3 or yarn");
  config.rope_theta = reader.number("rope_theta", config.rope_theta);
  reader.only("partial_rotary_factor", 1.0);
  const auto original = [&] {
    scaling.original_max_positions = reader.integer("original_max_position_embeddings", config.max_positions);
  };
  if (scaling.kind == "linear" || scaling.kind == "dynamic") scaling.factor = reader.number("factor");
  if (scaling.kind == "llama3") {
    scaling.factor = reader.number("factor");
    scaling.low_frequency_factor = reader.number("low_freq_factor");
    scaling.high_frequency_factor = reader.number("high_freq_factor");
    original();
  }
  if (scaling.kind == "yarn") {
    original();
    scaling.factor = reader.number("factor", static_cast<double>(config.max_positions) /
                                                 static_cast<double>(scaling.original_max_positions));
    scaling.beta_fast = reader.number("beta_fast", 32), scaling.beta_slow = reader.number("beta_slow", 1);
    scaling.truncate = reader.flag("truncate", true);
    if (reader.find("attention_factor")) scaling.attention_factor = reader.number("attention_factor");
    const double scale = reader.number("mscale", 0), all = reader.number("mscale_all_dim", 0);
    if (!scaling.attention_factor && scale != 0 && all != 0) {
      const auto magnitude = [&](double weight) {
        return scaling.factor <= 1 ? 1.0 : 0.1 * weight * std::log(scaling.factor) + 1.0;
      };
      scaling.attention_factor = magnitude(scale) / magnitude(all);
    }
  }
  reader.finish({});
}

// transformers 5 writes rope_parameters, earlier versions rope_theta and rope_scaling.
void read_rotary(JsonReader& reader, const std::string& where, DecoderConfig& config) {
  config.rope_theta = reader.number("rope_theta", 10000);
  const bool theta_given = reader.has("rope_theta");
  const double theta = config.rope_theta;
  const auto* old_scaling = reader.find("rope_scaling");
  if (old_scaling) read_scaling(*old_scaling, where + "rope_scaling", config);
  if (const auto* parameters = reader.find("rope_parameters")) {
    const RopeScaling before = config.rope_scaling;
    read_scaling(*parameters, where + "rope_parameters", config);
    const RopeScaling& now = config.rope_scaling;
    const auto fields = [](const RopeScaling& s) {
      return std::tuple(s.kind, s.factor, s.low_frequency_factor, s.high_frequency_factor,
                        s.original_max_positions, s.beta_fast, s.beta_slow, s.truncate, s.attention_factor);
    };
    if ((theta_given && theta != config.rope_theta) || (old_scaling && fields(before) != fields(now)))
      reader.bad("rope_parameters", brief(*parameters), "the same as rope_theta and rope_scaling beside it");
  }
}

// A sliding window is harmless only where no sequence can be longer than it.
void read_window(JsonReader& reader, DecoderConfig& config) {
  bool slides = false;
  if (config.family == "mistral") {
    slides = reader.find("sliding_window") || !reader.has("sliding_window");  // absent: transformers' 4096
  } else if (is_qwen(config.family)) {
    const std::int64_t full = reader.integer("max_window_layers", 28);
    slides = reader.flag("use_sliding_window", false) && full < config.layers &&
             (reader.find("sliding_window") || !reader.has("sliding_window"));
    reader.find("sliding_window");  // says nothing unless it is used
  } else {
    reader.only("sliding_window", nullptr);
  }
  if (const auto* types = reader.find("layer_types")) {
    if (!types->is_array() || static_cast<std::int64_t>(types->size()) != config.layers)
      reader.bad_value("layer_types", fmt::format("a list of {} entries", config.layers));
    for (const auto& type : *types)
      if (type != "full_attention")
        reader.bad("layer_types", brief(type), "\"full_attention\" in every layer");
    if (config.family != "mistral") slides = false;
  }
  const std::int64_t window = slides ? reader.integer("sliding_window", 4096) : config.max_positions;
  if (window < config.max_positions)
    reader.bad("sliding_window", std::to_string(window),
               fmt::format("null, or at least max_position_embeddings ({}): attention within a window is not "
                           "supported",
                           config.max_positions));
}

void read_ends(JsonReader& reader, DecoderConfig& config) {
  config.bos = reader.integer("bos_token_id", -1);
  const auto* ends = reader.find("eos_token_id");
  if (!ends || !ends->is_array()) {
    config.eos = reader.integer("eos_token_id", -1);
    return;
  }
  for (const auto& end : *ends) {
    if (!end.is_number_unsigned()) reader.bad_value("eos_token_id", "a token or a list of tokens");
    (config.eos < 0 ? config.eos : config.more_eos.emplace_back()) = end.get<std::int64_t>();
  }
}

ordered_json scaling_json(const RopeScaling& scaling) {
  ordered_json object{{"rope_type", scaling.kind}};
  if (scaling.kind != "default") object["factor"] = scaling.factor;
  if (scaling.kind == "llama3") {
    object["low_freq_factor"] = scaling.low_frequency_factor;
    object["high_freq_factor"] = scaling.high_frequency_factor;
  }
  if (scaling.kind == "llama3" || scaling.kind == "yarn")
    object["original_max_position_embeddings"] = scaling.original_max_positions;
  if (scaling.kind == "yarn") {
    object["beta_fast"] = scaling.beta_fast;
    object["beta_slow"] = scaling.beta_slow;
    if (!scaling.truncate) object["truncate"] = false;
    if (scaling.attention_factor) object["attention_factor"] = *scaling.attention_factor;
  }
  return object;
}

}  // namespace

DecoderConfig parse_hf_config(const std::string& text, const std::filesystem::path& file) {
  const auto object = json::parse(text, nullptr, /*allow_exceptions=*/false);
  const std::string where = file.string() + ": ";
  if (!object.is_object())
    throw ConfigError({.where = file.string(),
                       .found = "no JSON object",
                       .expected = "a Hugging Face config.json",
                       .action = "Restore the file"});
  JsonReader reader(object, where);
  DecoderConfig config;
  config.family = reader.text("model_type");
  const std::string& family = config.family;
  if (family != "llama" && family != "mistral" && !is_qwen(family))
    reader.bad_value("model_type", "llama, qwen2, qwen3 or mistral");
  config.vocabulary = reader.integer("vocab_size");
  config.hidden = reader.integer("hidden_size");
  config.layers = reader.integer("num_hidden_layers");
  config.heads = reader.integer("num_attention_heads");
  // Where transformers would fill in a number of its own, the file must say it.
  config.key_value_heads = family == "llama" ? reader.integer("num_key_value_heads", config.heads)
                                             : reader.integer("num_key_value_heads");
  if (config.heads <= 0) reader.bad_value("num_attention_heads", "at least 1");
  config.head_dim = family == "qwen3" ? reader.integer("head_dim")
                                      : reader.integer("head_dim", config.hidden / config.heads);
  config.feed_forward = reader.integer("intermediate_size");
  config.max_positions = reader.integer("max_position_embeddings");
  config.norm_epsilon = reader.number("rms_norm_eps", 1e-6);
  config.tied_output = reader.flag("tie_word_embeddings", false);
  config.initializer_range = reader.number("initializer_range", 0.02);
  read_rotary(reader, where, config);
  read_window(reader, config);
  read_ends(reader, config);

  if (family == "llama" || family == "qwen3")
    config.attention_bias = config.output_bias = reader.flag("attention_bias", false);
  else
    reader.only("attention_bias", family == "qwen2");
  if (family == "qwen2") config.attention_bias = true;
  if (family == "llama")
    config.mlp_bias = reader.flag("mlp_bias", false);
  else
    reader.only("mlp_bias", false);
  config.query_key_norm = family == "qwen3";
  if (reader.text("hidden_act", "silu") != "swish") reader.only("hidden_act", "silu");
  reader.only("attention_dropout", 0.0);
  reader.only("pretraining_tp", 1);
  reader.only("partial_rotary_factor", 1.0);
  reader.only("is_encoder_decoder", false);
  reader.only("quantization_config", nullptr);
  reader.finish(kHarmless);
  try {
    check(config);
  } catch (const ConfigError& error) {
    ErrorText said = error.text();
    said.where = where + said.where;
    throw ConfigError(std::move(said));
  }
  return config;
}

std::string hf_config_text(const DecoderConfig& config, at::ScalarType dtype) {
  const std::string& family = config.family;
  const std::string name = family == "llama"   ? "Llama"
                           : family == "qwen2" ? "Qwen2"
                           : family == "qwen3" ? "Qwen3"
                                               : "Mistral";
  const char* type = dtype == at::kDouble ? "float64" : dtype == at::kFloat ? "float32" : "bfloat16";
  const auto token = [](std::int64_t id) { return id < 0 ? ordered_json(nullptr) : ordered_json(id); };
  ordered_json ends = token(config.eos);
  if (!config.more_eos.empty()) {
    ends = {config.eos};
    for (const std::int64_t end : config.more_eos) ends.push_back(end);
  }
  ordered_json object{{"architectures", {name + "ForCausalLM"}},
                      {"model_type", family},
                      {"vocab_size", config.vocabulary},
                      {"hidden_size", config.hidden},
                      {"num_hidden_layers", config.layers},
                      {"num_attention_heads", config.heads},
                      {"num_key_value_heads", config.key_value_heads},
                      {"head_dim", config.head_dim},
                      {"intermediate_size", config.feed_forward},
                      {"hidden_act", "silu"},
                      {"max_position_embeddings", config.max_positions},
                      {"rms_norm_eps", config.norm_epsilon},
                      {"tie_word_embeddings", config.tied_output},
                      {"initializer_range", config.initializer_range},
                      {"attention_dropout", 0.0},
                      {"bos_token_id", token(config.bos)},
                      {"eos_token_id", ends},
                      {"dtype", type},
                      {"torch_dtype", type},
                      {"use_cache", true}};
  if (family == "llama" || family == "qwen3") object["attention_bias"] = config.attention_bias;
  if (family == "llama") object["mlp_bias"] = config.mlp_bias;
  if (family == "mistral" || is_qwen(family)) object["sliding_window"] = nullptr;
  if (is_qwen(family)) object["use_sliding_window"] = false;
  // Both spellings, so that old and new versions of transformers compute the same.
  const bool scaled = config.rope_scaling.kind != "default";
  object["rope_theta"] = config.rope_theta;
  object["rope_scaling"] = scaled ? scaling_json(config.rope_scaling) : ordered_json(nullptr);
  object["rope_parameters"] = scaling_json(config.rope_scaling);
  object["rope_parameters"]["rope_theta"] = config.rope_theta;
  return object.dump(2) + "\n";
}

DecoderConfig read_hf_config(const std::filesystem::path& directory) {
  return parse_hf_config(read_file(directory / "config.json"), directory / "config.json");
}

}  // namespace isograd
