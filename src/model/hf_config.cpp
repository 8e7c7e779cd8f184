#include "model/hf_config.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "base/json.hpp"
#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "model/hf_experts.hpp"
#include "model/json_reader.hpp"

namespace isograd {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

// Keys that say how a model was made, stored or is used (generation included, as older files have it), and
// nothing about what it computes: transformers' code of these families reads none of them.
const std::set<std::string> kHarmless = {"_name_or_path",
                                         "name_or_path",
                                         "architectures",
                                         "transformers_version",
                                         "torch_dtype",
                                         "dtype",
                                         "use_cache",
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
                                         "_attn_implementation_autoset",
                                         "tokenizer_class",
                                         "torchscript",
                                         "finetuning_task",
                                         "max_sequence_length",
                                         "model_max_length",
                                         "is_llama_config",
                                         "transformers.js_config",
                                         "unsloth_fixed",
                                         "unsloth_version",
                                         "bad_words_ids",
                                         "begin_suppress_tokens",
                                         "decoder_start_token_id",
                                         "diversity_penalty",
                                         "do_sample",
                                         "early_stopping",
                                         "encoder_no_repeat_ngram_size",
                                         "exponential_decay_length_penalty",
                                         "forced_bos_token_id",
                                         "forced_eos_token_id",
                                         "length_penalty",
                                         "max_length",
                                         "min_length",
                                         "no_repeat_ngram_size",
                                         "num_beam_groups",
                                         "num_beams",
                                         "num_return_sequences",
                                         "output_scores",
                                         "prefix",
                                         "remove_invalid_values",
                                         "repetition_penalty",
                                         "return_dict_in_generate",
                                         "sep_token_id",
                                         "suppress_tokens",
                                         "task_specific_params",
                                         "temperature",
                                         "top_k",
                                         "top_p",
                                         "typical_p"};

bool is_qwen(const std::string& family) {
  return family == "qwen2" || family == "qwen3";
}

void read_scaling(const json& object, const std::string& where, DecoderConfig& config) {
  if (!object.is_object()) isograd::refuse(where, brief(object), "an object or null", "Correct config.json");
  JsonReader reader(object, where + ".");
  RopeScaling& scaling = config.rope_scaling;
  const std::string old_kind = reader.text("type", "default");
  scaling = {};
  scaling.kind = reader.text("rope_type", old_kind);
  // What transformers takes as Python's `x or absent`.
  const auto number_or = [&](const char* key, double absent) {
    const double given = reader.find(key) ? reader.number(key) : 0;
    return given == 0 ? absent : given;
  };
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
    const double ratio =
        static_cast<double>(config.max_positions) / static_cast<double>(scaling.original_max_positions);
    if (!reader.has("factor"))
      reader.bad_value(
          "factor",
          fmt::format("a number, or null for max_position_embeddings / original_max_position_embeddings, {}",
                      ratio));
    scaling.factor = reader.find("factor") ? reader.number("factor") : ratio;
    scaling.beta_fast = number_or("beta_fast", 32), scaling.beta_slow = number_or("beta_slow", 1);
    // Null is not true: only where the key is absent does transformers take its default.
    scaling.truncate = !reader.has("truncate") || (reader.find("truncate") && reader.flag("truncate", true));
    if (reader.find("attention_factor")) scaling.attention_factor = reader.number("attention_factor");
    const double scale = number_or("mscale", 0), all = number_or("mscale_all_dim", 0);
    if (!scaling.attention_factor && scale != 0 && all != 0) {
      const auto magnitude = [&](double weight) {
        return scaling.factor <= 1 ? 1.0 : 0.1 * weight * std::log(scaling.factor) + 1.0;
      };
      scaling.attention_factor = magnitude(scale) / magnitude(all);
    }
  }
  reader.finish({"finetuned"});  // of the first models with yarn; transformers says that it does not know it
}

// transformers 5 writes rope_parameters, earlier versions rope_theta and rope_scaling. Where both have
// something in them transformers takes rope_scaling alone; a base that it does not name is rope_theta, or
// 10000. A file whose spellings say different things is refused: who wrote it meant one of them.
void read_rotary(JsonReader& reader, const std::string& where, DecoderConfig& config) {
  const double theta = reader.number("rope_theta", config.family == "mixtral" ? 1e6 : 10000);
  const bool theta_given = reader.has("rope_theta");
  config.rope_theta = theta;
  std::optional<DecoderConfig> before;
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const auto* object = reader.find(key);
    if (!object || (object->is_object() && object->empty())) continue;
    DecoderConfig found = config;
    found.rope_theta = theta;
    read_scaling(*object, where + key, found);
    const auto fields = [](const DecoderConfig& c) {
      const RopeScaling& s = c.rope_scaling;
      return std::tuple(c.rope_theta, s.kind, s.factor, s.low_frequency_factor, s.high_frequency_factor,
                        s.original_max_positions, s.beta_fast, s.beta_slow, s.truncate, s.attention_factor);
    };
    if ((theta_given && found.rope_theta != theta) || (before && fields(*before) != fields(found)))
      reader.bad(key, fmt::format("{} (base {})", brief(*object), found.rope_theta),
                 before ? fmt::format("the same as rope_scaling beside it (base {})", before->rope_theta)
                        : fmt::format("the base of rope_theta beside it, {}", theta));
    before = found;
  }
  if (before) config = *before;
}

// A window is kept as the file says it; DecoderLM refuses documents that it would cut.
void read_window(JsonReader& reader, DecoderConfig& config) {
  bool slides = false;
  if (config.family == "mixtral") {
    slides = reader.find("sliding_window");
  } else if (config.family == "dots1") {
    if ((reader.find("sliding_window") || !reader.has("sliding_window")) && !reader.find("layer_types") &&
        reader.integer("max_window_layers", 62) < config.layers)
      reader.bad_value("sliding_window", "null, or max_window_layers of at least num_hidden_layers");
    reader.find("max_window_layers"), reader.find("use_sliding_window");
  } else if (is_qwen(config.dense_family()) && config.family != config.dense_family()) {
    reader.only("use_sliding_window", false);  // other layers slide there than in the dense families
    reader.find("sliding_window"), reader.find("max_window_layers");
  } else if (config.family == "mistral") {
    slides = reader.find("sliding_window") || !reader.has("sliding_window");  // absent: transformers' 4096
  } else if (is_qwen(config.family)) {
    config.full_layers = reader.integer("max_window_layers", 28);
    slides = reader.flag("use_sliding_window", false) &&
             (reader.find("sliding_window") || !reader.has("sliding_window"));
    reader.find("sliding_window");  // says nothing unless it is used
  } else {
    reader.only("sliding_window", nullptr);
  }
  if (const auto* types = reader.find("layer_types")) {
    if (!types->is_array() || static_cast<std::int64_t>(types->size()) != config.layers)
      reader.bad_value("layer_types", fmt::format("a list of {} entries", config.layers));
    std::int64_t full = 0;
    while (full < config.layers && (*types)[static_cast<std::size_t>(full)] == "full_attention") ++full;
    const bool may_slide = slides && is_qwen(config.family);
    for (std::int64_t layer = full; layer < config.layers; ++layer)
      if (const auto& type = (*types)[static_cast<std::size_t>(layer)];
          !may_slide || type != "sliding_attention")
        reader.bad("layer_types", brief(type),
                   may_slide ? "\"full_attention\" in the first layers, then \"sliding_attention\""
                             : "\"full_attention\" in every layer");
    if (may_slide) config.full_layers = full;  // what they say counts before max_window_layers
  }
  if (!slides || (is_qwen(config.family) && config.full_layers >= config.layers)) {
    config.full_layers = 0;
    return;
  }
  config.sliding_window = reader.integer("sliding_window", 4096);
  if (config.sliding_window < 1) reader.bad_value("sliding_window", "null, or at least 1");
}

// torch.nn.Embedding counts a negative padding token from the end.
void read_pad(JsonReader& reader, DecoderConfig& config) {
  if (!reader.find("pad_token_id")) return;
  const std::int64_t given = reader.integer("pad_token_id");
  config.pad = given < 0 ? given + config.vocabulary : given;
  if (config.pad < 0 || config.pad >= config.vocabulary)
    reader.bad_value("pad_token_id",
                     fmt::format("null, or a token of the vocabulary of {}", config.vocabulary));
}

void read_ends(JsonReader& reader, DecoderConfig& config) {
  const auto token = [&](const char* key) { return reader.find(key) ? reader.integer(key) : -1; };
  config.bos = token("bos_token_id");
  const auto* ends = reader.find("eos_token_id");
  if (!ends || !ends->is_array()) {
    config.eos = token("eos_token_id");
    return;
  }
  for (const auto& end : *ends) {
    if (!end.is_number_unsigned()) reader.bad_value("eos_token_id", "a token or a list of tokens");
    (config.eos < 0 ? config.eos : config.more_eos.emplace_back()) = end.get<std::int64_t>();
  }
}

// Keys of check() under their names in config.json. Others have the same name in both.
std::string key_in_file(const std::string& key, const std::string& family) {
  const bool dots = family == "dots1", mixtral = family == "mixtral";
  const std::map<std::string, std::string> names = {
      {"family", "model_type"},
      {"vocabulary", "vocab_size"},
      {"hidden", "hidden_size"},
      {"layers", "num_hidden_layers"},
      {"heads", "num_attention_heads"},
      {"key_value_heads", "num_key_value_heads"},
      {"heads * head_dim", "num_attention_heads * head_dim"},
      {"feed_forward", "intermediate_size"},
      {"max_positions", "max_position_embeddings"},
      {"norm_epsilon", "rms_norm_eps"},
      {"bos", "bos_token_id"},
      {"eos", "eos_token_id"},
      {"pad", "pad_token_id"},
      {"full_layers", "max_window_layers"},
      {"rope_scaling.kind", "rope_scaling.rope_type"},
      {"rope_scaling.low_frequency_factor", "rope_scaling.low_freq_factor"},
      {"rope_scaling.high_frequency_factor", "rope_scaling.high_freq_factor"},
      {"low_frequency_factor", "low_freq_factor"},
      {"rope_scaling.original_max_positions", "rope_scaling.original_max_position_embeddings"},
      {"experts", dots      ? "n_routed_experts"
                  : mixtral ? "num_local_experts"
                            : "num_experts"},
      {"experts_per_token", "num_experts_per_tok"},
      {"expert_feed_forward", mixtral ? "intermediate_size" : "moe_intermediate_size"},
      {"shared_expert_feed_forward", dots ? "n_shared_experts" : "shared_expert_intermediate_size"},
      {"normalise_experts", "norm_topk_prob"},
      {"dense_layers", dots ? "first_k_dense_replace" : "mlp_only_layers"},
      {"expert_groups", "n_group"},
      {"expert_groups_per_token", "topk_group"},
      {"expert_scale", "routed_scaling_factor"}};
  const auto found = names.find(key);
  return found == names.end() ? key : found->second;
}

ErrorText in_words_of_the_file(ErrorText said, const std::string& where, const std::string& family) {
  const std::string prefix = "model.";
  if (said.where.starts_with(prefix)) said.where = key_in_file(said.where.substr(prefix.size()), family);
  said.where = where + said.where;
  // Words with an underscore are keys.
  std::string expected;
  for (std::size_t at = 0; at < said.expected.size();) {
    const std::size_t end =
        std::min(said.expected.find_first_not_of("abcdefghijklmnopqrstuvwxyz_", at), said.expected.size());
    const std::string word = said.expected.substr(at, std::max<std::size_t>(end - at, 1));
    expected += word.find('_') == std::string::npos ? word : key_in_file(word, family);
    at += word.size();
  }
  said.expected = expected;
  said.action = "Correct config.json";
  return said;
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
  const auto [object, problem] = parse_json(text);
  const std::string where = file.string() + ": ";
  if (!problem.empty())
    isograd::refuse(file.string(), problem, "a Hugging Face config.json", "Restore the file");
  JsonReader reader(object, where);
  DecoderConfig config;
  config.family = reader.text("model_type");
  const std::string family = config.dense_family();
  const bool has_experts = family != config.family;
  if (family != "llama" && family != "mistral" && !is_qwen(family))
    reader.bad_value("model_type", "llama, qwen2, qwen3, mistral, mixtral, qwen2_moe, qwen3_moe or dots1");
  config.vocabulary = reader.integer("vocab_size");
  config.hidden = reader.integer("hidden_size");
  config.layers = reader.integer("num_hidden_layers");
  config.heads = reader.integer("num_attention_heads");
  // Where transformers would fill in a number of its own, the file must say it.
  const auto is_none = [&](const char* key) { return reader.has(key) && !reader.find(key); };
  config.key_value_heads = config.family != "mistral" && is_none("num_key_value_heads") ? config.heads
                           : family == "llama" ? reader.integer("num_key_value_heads", config.heads)
                                               : reader.integer("num_key_value_heads");
  if (config.heads <= 0) reader.bad_value("num_attention_heads", "at least 1");
  config.head_dim = config.family == "qwen3" || reader.find("head_dim") ? reader.integer("head_dim")
                                                                        : config.hidden / config.heads;
  config.feed_forward = reader.integer("intermediate_size");
  config.max_positions = reader.integer("max_position_embeddings");
  config.norm_epsilon = reader.number("rms_norm_eps", config.family == "mixtral" ? 1e-5 : 1e-6);
  config.tied_output = reader.flag("tie_word_embeddings", false);
  config.initializer_range = reader.number("initializer_range", 0.02);
  read_rotary(reader, where, config);
  read_window(reader, config);
  read_ends(reader, config);
  read_pad(reader, config);
  if (has_experts) read_experts(reader, config);

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
  // transformers 5 reads it nowhere, and 4 cut a product into so many parts, which changes no result.
  if (reader.find("pretraining_tp")) reader.integer("pretraining_tp");
  reader.only("partial_rotary_factor", 1.0);
  reader.only("is_encoder_decoder", false);
  reader.only("use_mrope", false);
  reader.only("rope_interleaved", false);
  reader.only("quantization_config", nullptr);
  reader.finish(kHarmless);
  try {
    check(config);
  } catch (const ConfigError& error) {
    throw ConfigError(in_words_of_the_file(error.text(), where, config.family));
  }
  return config;
}

std::string hf_config_text(const DecoderConfig& config, at::ScalarType dtype) {
  const std::string family = config.dense_family();
  const std::string name = config.family == "mixtral" ? "Mixtral"
                           : config.family == "dots1" ? "Dots1"
                           : family == "llama"        ? "Llama"
                           : family == "qwen2"        ? "Qwen2"
                           : family == "qwen3"        ? "Qwen3"
                                                      : "Mistral";
  const bool has_experts = family != config.family;
  const char* type = dtype == at::kDouble ? "float64" : dtype == at::kFloat ? "float32" : "bfloat16";
  const auto token = [](std::int64_t id) { return id < 0 ? ordered_json(nullptr) : ordered_json(id); };
  ordered_json ends = token(config.eos);
  if (!config.more_eos.empty()) {
    ends = {config.eos};
    for (const std::int64_t end : config.more_eos) ends.push_back(end);
  }
  ordered_json object{
      {"architectures", {name + (config.family.ends_with("_moe") ? "Moe" : "") + "ForCausalLM"}},
      {"model_type", config.family},
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
      {"pad_token_id", token(config.pad)},
      {"dtype", type},
      {"torch_dtype", type},
      {"use_cache", true}};
  if (family == "llama" || family == "qwen3") object["attention_bias"] = config.attention_bias;
  if (family == "llama") object["mlp_bias"] = config.mlp_bias;
  if (family == "mistral" || is_qwen(family)) object["sliding_window"] = nullptr;
  if (is_qwen(family)) object["use_sliding_window"] = config.sliding_window > 0;
  if (has_experts) write_experts(object, config);
  if (config.sliding_window > 0) {
    object["sliding_window"] = config.sliding_window;
    if (is_qwen(family)) object["max_window_layers"] = config.full_layers;
  }
  // Both spellings, so that old and new versions of transformers compute the same.
  const bool scaled = config.rope_scaling.kind != "default";
  object["rope_theta"] = config.rope_theta;
  object["rope_scaling"] = scaled ? scaling_json(config.rope_scaling) : ordered_json(nullptr);
  object["rope_parameters"] = scaling_json(config.rope_scaling);
  object["rope_parameters"]["rope_theta"] = config.rope_theta;
  return object.dump(2) + "\n";
}

std::vector<std::int64_t> parse_generation_eos(const std::string& text, const std::filesystem::path& file) {
  const auto [object, problem] = parse_json(text);
  const auto refuse = [&](const std::string& where, const std::string& found, const char* expected) {
    isograd::refuse(file.string() + where, found, expected,
                    "Correct the file, or remove it: eos_token_id of config.json counts then");
  };
  if (!problem.empty()) refuse("", problem, "a Hugging Face generation_config.json");
  const json ends = object.value("eos_token_id", json());
  std::vector<std::int64_t> tokens;
  if (ends.is_null()) return tokens;
  for (const json& end : ends.is_array() ? ends : json::array({ends})) {
    if (!end.is_number_integer()) refuse(": eos_token_id", brief(ends), "a token or a list of tokens");
    tokens.push_back(end.get<std::int64_t>());
  }
  return tokens;
}

DecoderConfig read_hf_config(const std::filesystem::path& directory) {
  DecoderConfig config = parse_hf_config(read_file(directory / "config.json"), directory / "config.json");
  if (const auto file = directory / kGenerationConfig; std::filesystem::exists(file)) {
    config.generation_config = read_file(file);
    config.generation_eos = parse_generation_eos(config.generation_config, file);
  }
  return config;
}

}  // namespace isograd
