// Facts of the plain data of include/plan/planner.hpp.
#include "plan/planner.hpp"

#include <algorithm>

#include "plan/problem.hpp"

namespace isograd::planner {

double bytes_of(Precision precision) {
  constexpr std::array<double, kPrecisions> kBytes = {8, 4, 2, 1};
  return kBytes[static_cast<std::size_t>(precision)];
}

std::string_view name_of(Precision precision) { return kPrecisionNames[static_cast<std::size_t>(precision)]; }
std::string_view name_of(Origin origin) { return kOriginNames[static_cast<std::size_t>(origin)]; }

std::string_view name_of(Strategy strategy) {
  constexpr std::array<std::string_view, 4> kNames = {"bucketed", "zero1", "zero2", "zero3"};
  return kNames[static_cast<std::size_t>(strategy)];
}

std::string_view name_of(Schedule schedule) {
  constexpr std::array<std::string_view, 6> kNames = {"none",        "1f1b",  "gpipe",
                                                      "interleaved", "zb-h1", "zb-v"};
  return kNames[static_cast<std::size_t>(schedule)];
}

bool ModelShape::has_experts(std::int64_t layer) const {
  return experts.count > 0 && !std::ranges::binary_search(experts.dense_layers, layer);
}

namespace {

// Trained elements; of a mixture those of `experts` experts.
double elements(const ModelShape& of, std::int64_t experts) {
  const auto hidden = static_cast<double>(of.hidden);
  const auto queries = static_cast<double>(of.heads * of.head_dim),
             keys = static_cast<double>(of.key_heads * of.head_dim);
  const auto matrices = [&](std::int64_t width) {
    return (of.gated ? 3 : 2) * hidden * static_cast<double>(width);
  };
  double all =
      hidden * static_cast<double>(of.vocabulary) * (of.tied_output ? 1 : 2) + hidden;  // and the last norm
  for (std::int64_t layer = 0; layer < of.layers; ++layer) {
    all += 2 * hidden * (queries + keys) + 2 * hidden;  // q, k, v and o, and two norms
    if (of.attention_bias) all += queries + 2 * keys;
    if (of.output_bias) all += hidden;
    if (of.query_key_norm) all += 2 * static_cast<double>(of.head_dim);
    if (!of.has_experts(layer)) {
      all += matrices(of.feed_forward);
      if (of.mlp_bias) all += hidden + (of.gated ? 2 : 1) * static_cast<double>(of.feed_forward);
      continue;
    }
    const ModelShape::Experts& mixture = of.experts;
    all += hidden * static_cast<double>(mixture.count);  // the router
    all +=
        static_cast<double>(experts) * matrices(mixture.feed_forward) + matrices(mixture.shared_feed_forward);
    if (mixture.shared_feed_forward > 0 && of.family == "qwen2_moe")
      all += hidden;  // the shared expert's switch
  }
  return all;
}

}  // namespace

double ModelShape::parameters() const { return elements(*this, experts.count); }
double ModelShape::active_parameters() const { return elements(*this, experts.per_token); }

std::int64_t Work::samples() const {
  return sequence > 0 ? static_cast<std::int64_t>(tokens / static_cast<double>(sequence)) : 0;
}

double StepParts::total() const {
  return products + attention + memory_bound + overhead + tp + cp + ep + bubble + gather + reduce + norm +
         optimizer + publish + uneven;
}

DecoderConfig decoder_of(const ModelShape& model) {
  DecoderConfig config;
  config.family = model.family;
  config.vocabulary = model.vocabulary;
  config.hidden = model.hidden;
  config.layers = model.layers;
  config.heads = model.heads;
  config.key_value_heads = model.key_heads;
  config.head_dim = model.head_dim;
  config.feed_forward = model.feed_forward;
  config.tied_output = model.tied_output;
  config.attention_bias = model.attention_bias;
  config.output_bias = model.output_bias;
  config.mlp_bias = model.mlp_bias;
  config.query_key_norm = model.query_key_norm;
  config.experts.count = model.experts.count;
  config.experts.per_token = model.experts.per_token;
  config.experts.feed_forward = model.experts.feed_forward;
  config.experts.shared_feed_forward = model.experts.shared_feed_forward;
  config.experts.dense_layers = model.experts.dense_layers;
  config.experts.sigmoid = model.family == "dots1";
  return config;
}

ModelShape shape_of(const DecoderConfig& config, std::string name) {
  const ExpertsShape& experts = config.experts;
  return {.name = std::move(name),
          .family = config.family,
          .layers = config.layers,
          .hidden = config.hidden,
          .heads = config.heads,
          .key_heads = config.key_value_heads,
          .head_dim = config.head_dim,
          .feed_forward = config.feed_forward,
          .vocabulary = config.vocabulary,
          .tied_output = config.tied_output,
          .attention_bias = config.attention_bias,
          .output_bias = config.output_bias,
          .mlp_bias = config.mlp_bias,
          .query_key_norm = config.query_key_norm,
          .experts = {.count = experts.count,
                      .per_token = experts.per_token,
                      .feed_forward = experts.feed_forward,
                      .shared_feed_forward = experts.shared_feed_forward,
                      .dense_layers = experts.dense_layers}};
}

}  // namespace isograd::planner
