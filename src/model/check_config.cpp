// Which shapes are possible.
#include <cmath>

#include "isograd/decoder_lm.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

[[noreturn]] void bad(const char* key, const std::string& found, const std::string& expected) {
  throw ConfigError({.where = std::string("model.") + key,
                     .found = found,
                     .expected = expected,
                     .action = "Correct the model's shape"});
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

}  // namespace

void check(const DecoderConfig& config) {
  const std::string& family = config.family;
  if (family != "llama" && family != "qwen2" && family != "qwen3" && family != "mistral")
    bad("family", family, "llama, qwen2, qwen3 or mistral");
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
}

}  // namespace isograd
