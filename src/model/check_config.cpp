// Which shapes are possible.
#include <algorithm>
#include <cmath>

#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "isograd/model.hpp"

namespace isograd {
namespace {

[[noreturn]] void bad(const char* key, const std::string& found, const std::string& expected) {
  refuse(std::string("model.") + key, found, expected, "Correct the model's shape");
}

void at_least_one(const char* key, std::int64_t value) {
  constexpr std::int64_t kMost = std::int64_t{1} << 28;  // bytes of a product of two stay far from overflow
  if (value < 1 || value > kMost) bad(key, std::to_string(value), fmt::format("1 to {}", kMost));
}

void above_zero(const char* key, double value) {
  if (!(value > 0) || !std::isfinite(value)) bad(key, fmt::format("{}", value), "a number above 0");
}

void check_scaling(const DecoderConfig& config) {
  const RopeScaling& scaling = config.rope_scaling;
  const std::string& kind = scaling.kind;
  if (kind == "default") return;
  if (kind != "linear" && kind != "dynamic" && kind != "llama3" && kind != "yarn")
    bad("rope_scaling.kind", kind, "default, linear, dynamic, llama3 or yarn");
  if (!(scaling.factor >= 1) || !std::isfinite(scaling.factor))
    bad("rope_scaling.factor", fmt::format("{}", scaling.factor), "1 or more");
  if (kind == "dynamic" && config.head_dim <= 2)
    bad("head_dim", std::to_string(config.head_dim), "above 2 for dynamic scaling");
  if (kind == "llama3" || kind == "yarn")
    at_least_one("rope_scaling.original_max_positions", scaling.original_max_positions);
  if (kind == "llama3") {
    above_zero("rope_scaling.low_frequency_factor", scaling.low_frequency_factor);
    if (!(scaling.high_frequency_factor > scaling.low_frequency_factor) ||
        !std::isfinite(scaling.high_frequency_factor))
      bad("rope_scaling.high_frequency_factor", fmt::format("{}", scaling.high_frequency_factor),
          fmt::format("above low_frequency_factor, {}", scaling.low_frequency_factor));
  }
  if (kind == "yarn") {
    if (config.rope_theta <= 1) bad("rope_theta", fmt::format("{}", config.rope_theta), "above 1 for yarn");
    above_zero("rope_scaling.beta_slow", scaling.beta_slow);
    if (!(scaling.beta_fast >= scaling.beta_slow) || !std::isfinite(scaling.beta_fast))
      bad("rope_scaling.beta_fast", fmt::format("{}", scaling.beta_fast),
          fmt::format("at least beta_slow, {}", scaling.beta_slow));
    if (scaling.attention_factor) above_zero("rope_scaling.attention_factor", *scaling.attention_factor);
  }
}

// Of dots1 alone, and what its files can say.
void check_sigmoid_router(const DecoderConfig& config) {
  const ExpertsShape& experts = config.experts;
  const bool dots = config.family == "dots1";
  if (experts.sigmoid != dots)
    bad("router", experts.sigmoid ? "sigmoid" : "softmax",
        fmt::format("{} for {}", dots ? "sigmoid" : "softmax", config.family));
  if (!dots) {
    if (experts.groups != 1) bad("expert_groups", std::to_string(experts.groups), "1 for " + config.family);
    if (experts.groups_per_token != 1)
      bad("expert_groups_per_token", std::to_string(experts.groups_per_token), "1 for " + config.family);
    if (experts.scale != 1) bad("expert_scale", fmt::format("{}", experts.scale), "1 for " + config.family);
    return;
  }
  at_least_one("expert_groups", experts.groups);
  at_least_one("expert_groups_per_token", experts.groups_per_token);
  above_zero("expert_scale", experts.scale);
  if (experts.count % experts.groups != 0 || experts.count / experts.groups < 2)
    bad("expert_groups", std::to_string(experts.groups),
        fmt::format("a divisor of the {} experts that leaves two or more for each", experts.count));
  if (experts.groups_per_token > experts.groups)
    bad("expert_groups_per_token", std::to_string(experts.groups_per_token),
        fmt::format("at most {}, the groups", experts.groups));
  if (const std::int64_t in_sight = experts.count / experts.groups * experts.groups_per_token;
      experts.per_token > in_sight)
    bad("experts_per_token", std::to_string(experts.per_token),
        fmt::format("at most {}, the experts of a token's groups", in_sight));
  if (experts.shared_feed_forward % experts.feed_forward != 0)
    bad("shared_expert_feed_forward", std::to_string(experts.shared_feed_forward),
        fmt::format("a multiple of expert_feed_forward, {}", experts.feed_forward));
  for (std::size_t i = 0; i < experts.dense_layers.size(); ++i)
    if (experts.dense_layers[i] != static_cast<std::int64_t>(i))
      bad("dense_layers", std::to_string(experts.dense_layers[i]), "the first layers for dots1");
}

void check_experts(const DecoderConfig& config) {
  const ExpertsShape& experts = config.experts;
  if (config.family == config.dense_family())
    bad("experts", std::to_string(experts.count),
        fmt::format("0 for {} (mixtral, qwen2_moe, qwen3_moe and dots1 have them)", config.family));
  at_least_one("experts", experts.count);
  at_least_one("expert_feed_forward", experts.feed_forward);
  at_least_one("experts_per_token", experts.per_token);
  if (experts.per_token > experts.count)
    bad("experts_per_token", std::to_string(experts.per_token),
        fmt::format("at most {}, the experts", experts.count));
  const bool has_shared = config.family == "qwen2_moe" || config.family == "dots1";
  if (experts.shared_feed_forward < 0 || (experts.shared_feed_forward > 0) != has_shared)
    bad("shared_expert_feed_forward", std::to_string(experts.shared_feed_forward),
        (has_shared ? "at least 1 for " : "0 for ") + config.family);
  check_sigmoid_router(config);
  if (config.family == "mixtral" && experts.feed_forward != config.feed_forward)
    bad("expert_feed_forward", std::to_string(experts.feed_forward),
        fmt::format("feed_forward, {}, for mixtral: its files have one width", config.feed_forward));
  if (config.family == "mixtral" && !experts.normalise) bad("normalise_experts", "false", "true for mixtral");
  for (std::size_t i = 0; i < experts.dense_layers.size(); ++i) {
    const std::int64_t layer = experts.dense_layers[i];
    if (layer < 0 || layer >= config.layers || (i > 0 && layer <= experts.dense_layers[i - 1]))
      bad("dense_layers", std::to_string(layer),
          fmt::format("layers of 0 to {}, ascending", config.layers - 1));
  }
  if (config.family == "mixtral" && !experts.dense_layers.empty())
    bad("dense_layers", std::to_string(experts.dense_layers.front()), "none for mixtral");
  if (config.sliding_window > 0 && config.family != "mixtral")
    bad("sliding_window", std::to_string(config.sliding_window), "0 (none) for " + config.family);
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
  if (config.family != family && config.experts.count == 0)
    bad("experts", "0", fmt::format("at least 1 for {}", config.family));
  if (family != "llama" && family != "qwen2" && family != "qwen3" && family != "mistral")
    bad("family", config.family, "llama, qwen2, qwen3, mistral, mixtral, qwen2_moe, qwen3_moe or dots1");
  if (config.experts.count != 0) check_experts(config);
  at_least_one("vocabulary", config.vocabulary);
  at_least_one("hidden", config.hidden);
  at_least_one("layers", config.layers);
  at_least_one("heads", config.heads);
  at_least_one("key_value_heads", config.key_value_heads);
  at_least_one("head_dim", config.head_dim);
  at_least_one("heads * head_dim", config.heads * config.head_dim);
  at_least_one("feed_forward", config.feed_forward);
  at_least_one("max_positions", config.max_positions);
  if (config.heads % config.key_value_heads != 0)
    bad("key_value_heads", std::to_string(config.key_value_heads),
        fmt::format("a divisor of heads, {}", config.heads));
  if (config.head_dim % 2 != 0)
    bad("head_dim", std::to_string(config.head_dim), "an even number: the rotary embedding turns pairs");
  if (family == "llama" && config.hidden % config.heads != 0)
    bad("hidden", std::to_string(config.hidden),
        fmt::format("a multiple of heads, {} (transformers loads no other Llama)", config.heads));
  above_zero("rope_theta", config.rope_theta);
  above_zero("norm_epsilon", config.norm_epsilon);
  if (!(config.initializer_range >= 0) || !std::isfinite(config.initializer_range))
    bad("initializer_range", fmt::format("{}", config.initializer_range), "0 or more");
  const std::pair<const char*, std::int64_t> tokens[] = {
      {"bos", config.bos}, {"eos", config.eos}, {"pad", config.pad}};
  for (const auto& [key, token] : tokens)
    if (token < -1) bad(key, std::to_string(token), "-1 (none) or a token");
  if (config.pad >= config.vocabulary)
    bad("pad", std::to_string(config.pad),
        fmt::format("-1 (none), or below vocabulary, {}", config.vocabulary));
  if (config.sliding_window < 0 || (config.sliding_window > 0 && family == "llama"))
    bad("sliding_window", std::to_string(config.sliding_window),
        family == "llama" ? "0 (none) for llama" : "0 (none) or more");
  if (config.full_layers < 0) bad("full_layers", std::to_string(config.full_layers), "0 or more");

  // What the families' files in Hugging Face's form can say.
  const auto wants = [&](const char* key, bool found, bool expected) {
    if (found != expected) bad(key, found ? "true" : "false", fmt::format("{} for {}", expected, family));
  };
  wants("query_key_norm", config.query_key_norm, family == "qwen3");
  if (family == "qwen2") wants("attention_bias", config.attention_bias, true);
  if (family == "mistral") wants("attention_bias", config.attention_bias, false);
  wants("output_bias", config.output_bias,
        family == "llama" || family == "qwen3" ? config.attention_bias : false);
  if (family != "llama") wants("mlp_bias", config.mlp_bias, false);
  check_scaling(config);
  check_size(config);
}

}  // namespace isograd
