// config.json of a Hugging Face directory: tables of keys that are read, written and named in messages.
#include "model/hf.hpp"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <variant>

#include "base/files.hpp"
#include "base/json.hpp"
#include "base/refuse.hpp"
#include "model/safetensors.hpp"

namespace isograd {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

// Keys that say how a model was made, stored or is used (generation included, as older files have it), and
// nothing about what it computes: transformers' code of these families reads none of them.
constexpr std::string_view kHarmless =
    " _name_or_path name_or_path architectures transformers_version torch_dtype dtype use_cache"
    " return_dict output_attentions output_hidden_states id2label label2id problem_type"
    " chunk_size_feed_forward _commit_hash _attn_implementation attn_implementation"
    " _attn_implementation_autoset tokenizer_class torchscript finetuning_task max_sequence_length"
    " model_max_length is_llama_config transformers.js_config unsloth_fixed unsloth_version bad_words_ids"
    " begin_suppress_tokens decoder_start_token_id diversity_penalty do_sample early_stopping"
    " encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id"
    " forced_eos_token_id length_penalty max_length min_length no_repeat_ngram_size num_beam_groups"
    " num_beams num_return_sequences output_scores prefix remove_invalid_values repetition_penalty"
    " return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature top_k top_p"
    " typical_p ";

// Reads an untrusted JSON object key by key; keys that nobody asked for are refused.
class JsonReader {
 public:
  // `where` stands in front of keys in messages. Keeps a reference to `object`.
  JsonReader(const json& object, std::string where) : object_(object), where_(std::move(where)) {}

  [[noreturn]] void bad(const std::string& key, const std::string& found, const std::string& expected) const {
    refuse(
        where_ + key, found, expected,
        "Use a model that isograd computes to the letter: Llama, Qwen2, Qwen3, Mistral, Mixtral, Qwen2-MoE, "
        "Qwen3-MoE or dots1, with full attention or a sliding window that documents fit into");
  }
  [[noreturn]] void bad_value(const std::string& key, const std::string& expected) const {
    bad(key, has(key) ? brief(object_[key]) : "no such key", expected);
  }

  bool has(const std::string& key) const { return object_.contains(key); }
  // Null counts as absent.
  const json* find(const std::string& key) {
    const json* found = value(key);
    return found && found->is_null() ? nullptr : found;
  }
  // Without `absent` the key must be there. Null is refused, as transformers does where a number, flag or
  // text must be; ask find() first where it may stand for "none".
  std::int64_t integer(const std::string& key, std::optional<std::int64_t> absent = {}) {
    constexpr std::int64_t kMost = std::int64_t{1} << 53;
    return get(key, absent, "a whole number", [](const json& found) {
      return found.is_number_integer() &&
             !(found.is_number_unsigned() && found.get<std::uint64_t>() > kMost) &&
             found.get<std::int64_t>() >= -kMost;
    });
  }
  double number(const std::string& key, std::optional<double> absent = {}) {
    return get(key, absent, "a number",
               [](const json& found) { return found.is_number() && std::isfinite(found.get<double>()); });
  }
  bool flag(const std::string& key, std::optional<bool> absent = {}) {
    return get(key, absent, "true or false", [](const json& found) { return found.is_boolean(); });
  }
  std::string text(const std::string& key, std::optional<std::string> absent = {}) {
    return get(key, absent, "a text", [](const json& found) { return found.is_string(); });
  }
  // A key that would change the mathematics: only this value will do, null, or no such key.
  void only(const std::string& key, const json& wanted) {
    const json* found = find(key);
    if (found && *found != wanted) bad_value(key, brief(wanted) + ", or no such key");
  }
  void finish(std::string_view harmless) const {
    for (const auto& [key, value] : object_.items())
      if (!seen_.contains(key) && harmless.find(" " + key + " ") == std::string_view::npos)
        bad_value(key, "no such key: it may change what the model computes");
  }

 private:
  const json* value(const std::string& key) {  // null included; nullptr: no such key
    seen_.insert(key);
    const auto place = object_.find(key);
    return place == object_.end() ? nullptr : &*place;
  }
  template <typename T, typename Fits>
  T get(const std::string& key, const std::optional<T>& absent, const char* expected, const Fits& fits) {
    const json* found = value(key);
    if (!found && absent) return *absent;
    if (!found || !fits(*found)) bad_value(key, expected);
    return found->get<T>();
  }

  const json& object_;
  std::string where_;
  std::set<std::string> seen_;
};

// A number or flag of a shape: its name in the messages of check() and in config.json. Without `absent` the
// file must have it.
template <typename Shape>
struct Key {
  const char *own, *file;
  std::variant<std::int64_t Shape::*, double Shape::*, bool Shape::*> member;
  std::optional<double> absent{};

  void read(JsonReader& reader, Shape& shape) const {
    const auto as = [&](auto type) {
      return absent ? std::optional(static_cast<decltype(type)>(*absent)) : std::nullopt;
    };
    if (const auto* whole = std::get_if<std::int64_t Shape::*>(&member))
      shape.** whole = reader.integer(file, as(std::int64_t{}));
    else if (const auto* number = std::get_if<double Shape::*>(&member))
      shape.** number = reader.number(file, as(double{}));
    else
      shape.*std::get<bool Shape::*>(member) = reader.flag(file, as(bool{}));
  }
  void write(ordered_json& object, const Shape& shape) const {
    std::visit([&](const auto of) { object[file] = shape.*of; }, member);
  }
};

using C = DecoderConfig;
using E = ExpertsShape;

const std::vector<Key<C>> kSizes = {{"vocabulary", "vocab_size", &C::vocabulary},
                                    {"hidden", "hidden_size", &C::hidden},
                                    {"layers", "num_hidden_layers", &C::layers},
                                    {"heads", "num_attention_heads", &C::heads}};
const std::vector<Key<C>> kHeads = {{"key_value_heads", "num_key_value_heads", &C::key_value_heads},
                                    {"head_dim", "head_dim", &C::head_dim}};
std::vector<Key<C>> other_keys(const std::string& family) {
  return {{"feed_forward", "intermediate_size", &C::feed_forward},
          {"max_positions", "max_position_embeddings", &C::max_positions},
          {"norm_epsilon", "rms_norm_eps", &C::norm_epsilon, family == "mixtral" ? 1e-5 : 1e-6},
          {"tied_output", "tie_word_embeddings", &C::tied_output, 0},
          {"initializer_range", "initializer_range", &C::initializer_range, 0.02}};
}

std::vector<Key<E>> expert_keys(const std::string& family) {
  const bool dots = family == "dots1", mixtral = family == "mixtral";
  std::vector<Key<E>> keys = {
      {"experts",
       dots      ? "n_routed_experts"
       : mixtral ? "num_local_experts"
                 : "num_experts",
       &E::count},
      {"experts_per_token", "num_experts_per_tok", &E::per_token},
      {"expert_feed_forward", mixtral ? "intermediate_size" : "moe_intermediate_size", &E::feed_forward}};
  if (!mixtral) keys.push_back({"normalise_experts", "norm_topk_prob", &E::normalise, 0});
  if (dots) {
    keys.push_back({"expert_groups", "n_group", &E::groups, 1});
    keys.push_back({"expert_groups_per_token", "topk_group", &E::groups_per_token, 1});
    keys.push_back({"expert_scale", "routed_scaling_factor", &E::scale, 1});
  }
  return keys;
}

// The name in config.json of a key of check(). Others have the same name in both.
std::string key_in_file(const std::string& key, const std::string& family) {
  for (const auto& keys : {kSizes, kHeads, other_keys(family)})
    for (const auto& one : keys)
      if (key == one.own) return one.file;
  for (const auto& one : expert_keys(family))
    if (key == one.own) return one.file;
  const bool dots = family == "dots1";
  const std::pair<const char*, const char*> more[] = {
      {"family", "model_type"},
      {"heads * head_dim", "num_attention_heads * head_dim"},
      {"bos", "bos_token_id"},
      {"eos", "eos_token_id"},
      {"pad", "pad_token_id"},
      {"full_layers", "max_window_layers"},
      {"rope_scaling.kind", "rope_scaling.rope_type"},
      {"rope_scaling.low_frequency_factor", "rope_scaling.low_freq_factor"},
      {"rope_scaling.high_frequency_factor", "rope_scaling.high_freq_factor"},
      {"low_frequency_factor", "low_freq_factor"},
      {"rope_scaling.original_max_positions", "rope_scaling.original_max_position_embeddings"},
      {"shared_expert_feed_forward", dots ? "n_shared_experts" : "shared_expert_intermediate_size"},
      {"dense_layers", dots ? "first_k_dense_replace" : "mlp_only_layers"}};
  for (const auto& [own, file] : more)
    if (key == own) return file;
  return key;
}

bool is_qwen(const std::string& family) { return family == "qwen2" || family == "qwen3"; }

void read_scaling(const json& object, const std::string& where, DecoderConfig& config) {
  if (!object.is_object()) refuse(where, brief(object), "an object or null", "Correct config.json");
  JsonReader reader(object, where + ".");
  RopeScaling& scaling = config.rope_scaling;
  const std::string old_kind = reader.text("type", "default");
  scaling = {};
  scaling.kind = reader.text("rope_type", old_kind);
  // transformers takes these as Python's `x or absent`.
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
  reader.finish(" finetuned ");  // of the first models with yarn; transformers says that it does not know it
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
                 before ? fmt::format("the same as in rope_scaling (base {})", before->rope_theta)
                        : fmt::format("the base in rope_theta, {}", theta));
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
    if (!types->is_array() || std::ssize(*types) != config.layers)
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

// Layers without experts: those that are named, and all but every `step`-th.
std::vector<std::int64_t> read_dense_layers(JsonReader& reader, std::int64_t layers) {
  const std::int64_t step = reader.integer("decoder_sparse_step", 1);
  if (step < 1) reader.bad_value("decoder_sparse_step", "at least 1");
  std::vector<bool> dense(layers);
  for (std::int64_t layer = 0; layer < layers; ++layer) dense[layer] = (layer + 1) % step != 0;
  if (const json* named = reader.find("mlp_only_layers")) {
    if (!named->is_array()) reader.bad_value("mlp_only_layers", "a list of layers");
    for (const json& layer : *named) {
      if (!layer.is_number_integer()) reader.bad_value("mlp_only_layers", "a list of layers");
      const auto at = layer.get<std::int64_t>();  // others name no layer
      if (at >= 0 && at < layers) dense[at] = true;
    }
  }
  std::vector<std::int64_t> result;
  for (std::int64_t layer = 0; layer < layers; ++layer)
    if (dense[layer]) result.push_back(layer);
  return result;
}

// Under the name that a family's own files have, or another that transformers reads as the same.
std::int64_t read_count(JsonReader& reader, const char* own, const char* alias) {
  if (!reader.has(alias)) return reader.integer(own);
  const std::int64_t count = reader.integer(alias);
  if (reader.has(own) && reader.integer(own) != count)
    reader.bad_value(own, fmt::format("{}, that of {}, which is another name of the same", count, alias));
  return count;
}

// Keys of a family that has experts; family, layers and feed_forward are known.
void read_experts(JsonReader& reader, DecoderConfig& config) {
  ExpertsShape& experts = config.experts;
  const bool dots = config.family == "dots1", mixtral = config.family == "mixtral";
  for (const auto& key : expert_keys(config.family))
    if (key.own == std::string_view("experts"))
      experts.count = read_count(reader, key.file, mixtral ? "num_experts" : "num_local_experts");
    else
      key.read(reader, experts);
  if (dots) {
    experts.sigmoid = true;
    const std::int64_t shared = reader.integer("n_shared_experts");
    constexpr std::int64_t kMost = std::int64_t{1} << 28;  // check() refuses wider ones
    if (shared < 1 || shared > kMost || experts.feed_forward > kMost)
      reader.bad_value("n_shared_experts", "at least 1");
    experts.shared_feed_forward = shared * experts.feed_forward;
    const std::int64_t dense = reader.integer("first_k_dense_replace", 0);
    if (dense < 0 || dense >= config.layers)
      reader.bad_value("first_k_dense_replace", "0 or more, and one that leaves a layer with experts");
    for (std::int64_t layer = 0; layer < dense; ++layer) experts.dense_layers.push_back(layer);
    // The published files have both; transformers' code reads neither.
    reader.only("moe_layer_freq", 1);
    reader.only("scoring_func", "noaux_tc");
  } else {
    if (config.family == "qwen2_moe") {
      experts.shared_feed_forward = reader.integer("shared_expert_intermediate_size");
      reader.only("qkv_bias", true);
    }
    if (!mixtral) experts.dense_layers = read_dense_layers(reader, config.layers);
    if (std::ssize(experts.dense_layers) == config.layers)
      reader.bad_value("decoder_sparse_step", "one that leaves a layer with experts");
    reader.only("router_jitter_noise", 0.0);
    reader.number("router_aux_loss_coef", 0.001);  // the weight of a balance term, which is off below
  }
  reader.only("output_router_logits", false);
}

void write_experts(ordered_json& object, const DecoderConfig& config) {
  const ExpertsShape& experts = config.experts;
  for (const auto& key : expert_keys(config.family)) key.write(object, experts);
  object["output_router_logits"] = false;
  if (config.family == "dots1") {
    object["n_shared_experts"] = experts.shared_feed_forward / experts.feed_forward;
    object["first_k_dense_replace"] = experts.dense_layers.size();
  } else if (config.family != "mixtral") {
    object["decoder_sparse_step"] = 1;
    object["mlp_only_layers"] = experts.dense_layers;
    if (experts.shared_feed_forward > 0) {
      object["shared_expert_intermediate_size"] = experts.shared_feed_forward;
      object["qkv_bias"] = true;
    }
  }
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

DecoderConfig parse_hf_config(const std::string& text, const fs::path& file) {
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
  for (const auto& key : kSizes) key.read(reader, config);
  // Where transformers would fill in a number of its own, the file must say it.
  const auto is_none = [&](const char* key) { return reader.has(key) && !reader.find(key); };
  config.key_value_heads = config.family != "mistral" && is_none("num_key_value_heads") ? config.heads
                           : family == "llama" ? reader.integer("num_key_value_heads", config.heads)
                                               : reader.integer("num_key_value_heads");
  if (config.heads <= 0) reader.bad_value("num_attention_heads", "at least 1");
  config.head_dim = config.family == "qwen3" || reader.find("head_dim") ? reader.integer("head_dim")
                                                                        : config.hidden / config.heads;
  for (const auto& key : other_keys(config.family)) key.read(reader, config);
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
  const char* type = float_type(dtype).name;
  const auto token = [](std::int64_t id) { return id < 0 ? ordered_json(nullptr) : ordered_json(id); };
  ordered_json ends = token(config.eos);
  if (!config.more_eos.empty()) {
    ends = {config.eos};
    for (const std::int64_t end : config.more_eos) ends.push_back(end);
  }
  ordered_json object{
      {"architectures", {name + (config.family.ends_with("_moe") ? "Moe" : "") + "ForCausalLM"}},
      {"model_type", config.family}};
  for (const auto& keys : {kSizes, kHeads, other_keys(config.family)})
    for (const auto& key : keys) key.write(object, config);
  object.update({{"hidden_act", "silu"},
                 {"attention_dropout", 0.0},
                 {"bos_token_id", token(config.bos)},
                 {"eos_token_id", ends},
                 {"pad_token_id", token(config.pad)},
                 {"dtype", type},
                 {"torch_dtype", type},
                 {"use_cache", true}});
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

std::vector<std::int64_t> parse_generation_eos(const std::string& text, const fs::path& file) {
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

DecoderConfig read_hf_config(const fs::path& directory) {
  DecoderConfig config = parse_hf_config(read_file(directory / "config.json"), directory / "config.json");
  if (const auto file = directory / kGenerationConfig; fs::exists(file)) {
    config.generation_config = read_file(file);
    config.generation_eos = parse_generation_eos(config.generation_config, file);
  }
  return config;
}

}  // namespace isograd
