// Which shapes are possible.
#include <algorithm>
#include <cmath>

#include "base/refuse.hpp"
#include "isograd/model.hpp"
#include "model/parameters.hpp"

namespace isograd {
namespace {

void above_zero(const char* key, double value) {
  want(value > 0 && std::isfinite(value), key, value, "a number above 0");
}

void check_scaling(const DecoderConfig& config) {
  const RopeScaling& scaling = config.rope_scaling;
  const std::string& kind = scaling.kind;
  if (kind == "default") return;
  const bool llama3 = kind == "llama3", yarn = kind == "yarn";
  want(kind == "linear" || kind == "dynamic" || llama3 || yarn, "rope_scaling.kind", kind,
       "default, linear, dynamic, llama3 or yarn");
  want(scaling.factor >= 1 && std::isfinite(scaling.factor), "rope_scaling.factor", scaling.factor,
       "1 or more");
  want(kind != "dynamic" || config.head_dim > 2, "head_dim", config.head_dim, "above 2 for dynamic scaling");
  if (llama3 || yarn) want_size("rope_scaling.original_max_positions", scaling.original_max_positions);
  if (llama3) {
    above_zero("rope_scaling.low_frequency_factor", scaling.low_frequency_factor);
    want(scaling.high_frequency_factor > scaling.low_frequency_factor &&
             std::isfinite(scaling.high_frequency_factor),
         "rope_scaling.high_frequency_factor", scaling.high_frequency_factor,
         fmt::format("above low_frequency_factor, {}", scaling.low_frequency_factor));
  }
  if (yarn) {
    want(config.rope_theta > 1, "rope_theta", config.rope_theta, "above 1 for yarn");
    above_zero("rope_scaling.beta_slow", scaling.beta_slow);
    want(scaling.beta_fast >= scaling.beta_slow && std::isfinite(scaling.beta_fast), "rope_scaling.beta_fast",
         scaling.beta_fast, fmt::format("at least beta_slow, {}", scaling.beta_slow));
    if (scaling.attention_factor) above_zero("rope_scaling.attention_factor", *scaling.attention_factor);
  }
}

// dots1 has one, with what its files can say.
void check_sigmoid_router(const DecoderConfig& config) {
  const ExpertsShape& experts = config.experts;
  const bool dots = config.family == "dots1";
  want(experts.sigmoid == dots, "router", experts.sigmoid ? "sigmoid" : "softmax",
       fmt::format("{} for {}", dots ? "sigmoid" : "softmax", config.family));
  if (!dots) {
    want(experts.groups == 1, "expert_groups", experts.groups, "1 for " + config.family);
    want(experts.groups_per_token == 1, "expert_groups_per_token", experts.groups_per_token,
         "1 for " + config.family);
    want(experts.scale == 1, "expert_scale", experts.scale, "1 for " + config.family);
    return;
  }
  want_size("expert_groups", experts.groups);
  want_size("expert_groups_per_token", experts.groups_per_token);
  above_zero("expert_scale", experts.scale);
  want(experts.count % experts.groups == 0 && experts.count / experts.groups >= 2, "expert_groups",
       experts.groups,
       fmt::format("a divisor of the {} experts that leaves two or more for each", experts.count));
  want(experts.groups_per_token <= experts.groups, "expert_groups_per_token", experts.groups_per_token,
       fmt::format("at most {}, the groups", experts.groups));
  const std::int64_t in_sight = experts.count / experts.groups * experts.groups_per_token;
  want(experts.per_token <= in_sight, "experts_per_token", experts.per_token,
       fmt::format("at most {}, the experts of a token's groups", in_sight));
  want(experts.shared_feed_forward % experts.feed_forward == 0, "shared_expert_feed_forward",
       experts.shared_feed_forward,
       fmt::format("a multiple of expert_feed_forward, {}", experts.feed_forward));
  for (std::size_t i = 0; i < experts.dense_layers.size(); ++i)
    want(experts.dense_layers[i] == static_cast<std::int64_t>(i), "dense_layers", experts.dense_layers[i],
         "the first layers for dots1");
}

void check_experts(const DecoderConfig& config) {
  const ExpertsShape& experts = config.experts;
  const std::string& family = config.family;
  want(family != config.dense_family(), "experts", experts.count,
       fmt::format("0 for {} (mixtral, qwen2_moe, qwen3_moe and dots1 have them)", family));
  want_size("experts", experts.count);
  want_size("expert_feed_forward", experts.feed_forward);
  want_size("experts_per_token", experts.per_token);
  want(experts.per_token <= experts.count, "experts_per_token", experts.per_token,
       fmt::format("at most {}, the experts", experts.count));
  const bool has_shared = family == "qwen2_moe" || family == "dots1", mixtral = family == "mixtral";
  want(experts.shared_feed_forward >= 0 && (experts.shared_feed_forward > 0) == has_shared,
       "shared_expert_feed_forward", experts.shared_feed_forward,
       (has_shared ? "at least 1 for " : "0 for ") + family);
  check_sigmoid_router(config);
  want(!mixtral || experts.feed_forward == config.feed_forward, "expert_feed_forward", experts.feed_forward,
       fmt::format("feed_forward, {}, for mixtral: its files have one width", config.feed_forward));
  want(!mixtral || experts.normalise, "normalise_experts", experts.normalise, "true for mixtral");
  for (std::size_t i = 0; i < experts.dense_layers.size(); ++i) {
    const std::int64_t layer = experts.dense_layers[i];
    want(layer >= 0 && layer < config.layers && (i == 0 || layer > experts.dense_layers[i - 1]),
         "dense_layers", layer, fmt::format("layers of 0 to {}, ascending", config.layers - 1));
    want(!mixtral, "dense_layers", layer, "none for mixtral");
  }
  want(config.sliding_window <= 0 || mixtral, "sliding_window", config.sliding_window,
       "0 (none) for " + family);
}

// Bytes of all parameters, gradients and moments are counted in 64 bits.
void check_size(const DecoderConfig& config) {
  constexpr double kMost = 0x1p57;
  const auto of = [](std::int64_t number) { return static_cast<double>(number); };
  const double matrices = 3 * of(std::max<std::int64_t>(config.experts.count, 1)) *
                              of(std::max(config.feed_forward, config.experts.feed_forward)) +
                          4 * of(config.heads) * of(config.head_dim);
  const double parameters = of(config.hidden) * (of(config.layers) * matrices + 2 * of(config.vocabulary));
  if (parameters > kMost)
    refuse("the model's shape", fmt::format("about {:.2g} parameters", parameters),
           fmt::format("at most {:.2g}, whose bytes can be counted in 64 bits", kMost),
           "Make model.layers, model.hidden or another size smaller");
}

}  // namespace

bool DecoderConfig::has_experts(std::int64_t layer) const {
  return experts.count > 0 &&
         !std::binary_search(experts.dense_layers.begin(), experts.dense_layers.end(), layer);
}

std::vector<std::int64_t> DecoderConfig::ends() const {
  if (!generation_eos.empty()) return generation_eos;
  std::vector<std::int64_t> tokens = more_eos;
  if (eos >= 0) tokens.push_back(eos);
  return tokens;
}

std::string DecoderConfig::dense_family() const {
  if (family == "mixtral") return "mistral";
  return family == "qwen2_moe" ? "qwen2" : family == "qwen3_moe" || family == "dots1" ? "qwen3" : family;
}

void check(const DecoderConfig& config) {
  const std::string family = config.dense_family();
  want(config.family == family || config.experts.count != 0, "experts", 0,
       fmt::format("at least 1 for {}", config.family));
  want(family == "llama" || family == "qwen2" || family == "qwen3" || family == "mistral", "family",
       config.family, "llama, qwen2, qwen3, mistral, mixtral, qwen2_moe, qwen3_moe or dots1");
  if (config.experts.count != 0) check_experts(config);
  want_size("vocabulary", config.vocabulary);
  want_size("hidden", config.hidden);
  want_size("layers", config.layers);
  want_size("heads", config.heads);
  want_size("key_value_heads", config.key_value_heads);
  want_size("head_dim", config.head_dim);
  want_size("heads * head_dim", config.heads * config.head_dim);
  want_size("feed_forward", config.feed_forward);
  want_size("max_positions", config.max_positions);
  want(config.heads % config.key_value_heads == 0, "key_value_heads", config.key_value_heads,
       fmt::format("a divisor of heads, {}", config.heads));
  want(config.head_dim % 2 == 0, "head_dim", config.head_dim,
       "an even number: the rotary embedding turns pairs");
  want(family != "llama" || config.hidden % config.heads == 0, "hidden", config.hidden,
       fmt::format("a multiple of heads, {} (transformers loads no other Llama)", config.heads));
  above_zero("rope_theta", config.rope_theta);
  above_zero("norm_epsilon", config.norm_epsilon);
  want(config.initializer_range >= 0 && std::isfinite(config.initializer_range), "initializer_range",
       config.initializer_range, "0 or more");
  const std::pair<const char*, std::int64_t> tokens[] = {
      {"bos", config.bos}, {"eos", config.eos}, {"pad", config.pad}};
  for (const auto& [key, token] : tokens) want(token >= -1, key, token, "-1 (none) or a token");
  want(config.pad < config.vocabulary, "pad", config.pad,
       fmt::format("-1 (none), or below vocabulary, {}", config.vocabulary));
  want(config.sliding_window >= 0 && (config.sliding_window == 0 || family != "llama"), "sliding_window",
       config.sliding_window, family == "llama" ? "0 (none) for llama" : "0 (none) or more");
  want(config.full_layers >= 0, "full_layers", config.full_layers, "0 or more");

  // A family's files in Hugging Face's form can say no other.
  const auto is = [&](const char* key, bool found, bool expected) {
    want(found == expected, key, found, fmt::format("{} for {}", expected, family));
  };
  is("query_key_norm", config.query_key_norm, family == "qwen3");
  if (family == "qwen2" || family == "mistral")
    is("attention_bias", config.attention_bias, family == "qwen2");
  is("output_bias", config.output_bias,
     family == "llama" || family == "qwen3" ? config.attention_bias : false);
  if (family != "llama") is("mlp_bias", config.mlp_bias, false);
  check_scaling(config);
  check_size(config);
}

}  // namespace isograd
