#include "model/hf_experts.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace isograd {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

const std::string kStacked = ".mlp.experts.", kRouter = ".mlp.gate.weight";

// Layers without experts: those that are named, and all but every `step`-th.
std::vector<std::int64_t> read_dense_layers(JsonReader& reader, std::int64_t layers) {
  const std::int64_t step = reader.integer("decoder_sparse_step", 1);
  if (step < 1) reader.bad_value("decoder_sparse_step", "at least 1");
  std::vector<bool> dense(static_cast<std::size_t>(layers));
  for (std::int64_t layer = 0; layer < layers; ++layer)
    dense[static_cast<std::size_t>(layer)] = (layer + 1) % step != 0;
  if (const json* named = reader.find("mlp_only_layers")) {
    if (!named->is_array()) reader.bad_value("mlp_only_layers", "a list of layers");
    for (const json& layer : *named) {
      if (!layer.is_number_integer()) reader.bad_value("mlp_only_layers", "a list of layers");
      const auto at = layer.get<std::int64_t>();  // others name no layer
      if (at >= 0 && at < layers) dense[static_cast<std::size_t>(at)] = true;
    }
  }
  std::vector<std::int64_t> result;
  for (std::int64_t layer = 0; layer < layers; ++layer)
    if (dense[static_cast<std::size_t>(layer)]) result.push_back(layer);
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

void read_dots1(JsonReader& reader, DecoderConfig& config) {
  ExpertsShape& experts = config.experts;
  experts.sigmoid = true;
  experts.count = read_count(reader, "n_routed_experts", "num_local_experts");
  experts.per_token = reader.integer("num_experts_per_tok");
  experts.feed_forward = reader.integer("moe_intermediate_size");
  experts.normalise = reader.flag("norm_topk_prob", false);
  const std::int64_t shared = reader.integer("n_shared_experts");
  constexpr std::int64_t kMost = std::int64_t{1} << 28;  // check() refuses wider ones
  if (shared < 1 || shared > kMost || experts.feed_forward > kMost)
    reader.bad_value("n_shared_experts", "at least 1");
  experts.shared_feed_forward = shared * experts.feed_forward;
  experts.groups = reader.integer("n_group", 1);
  experts.groups_per_token = reader.integer("topk_group", 1);
  experts.scale = reader.number("routed_scaling_factor", 1.0);
  const std::int64_t dense = reader.integer("first_k_dense_replace", 0);
  if (dense < 0 || dense >= config.layers)
    reader.bad_value("first_k_dense_replace", "0 or more, and one that leaves a layer with experts");
  for (std::int64_t layer = 0; layer < dense; ++layer) experts.dense_layers.push_back(layer);
  reader.only("output_router_logits", false);
  // Of the published files; transformers' code reads neither.
  reader.only("moe_layer_freq", 1);
  reader.only("scoring_func", "noaux_tc");
}

}  // namespace

void read_experts(JsonReader& reader, DecoderConfig& config) {
  ExpertsShape& experts = config.experts;
  if (config.family == "dots1") return read_dots1(reader, config);
  const bool mixtral = config.family == "mixtral";
  experts.count = mixtral ? read_count(reader, "num_local_experts", "num_experts")
                          : read_count(reader, "num_experts", "num_local_experts");
  experts.per_token = reader.integer("num_experts_per_tok");
  experts.feed_forward = mixtral ? config.feed_forward : reader.integer("moe_intermediate_size");
  experts.normalise = mixtral || reader.flag("norm_topk_prob", false);
  if (config.family == "qwen2_moe") {
    experts.shared_feed_forward = reader.integer("shared_expert_intermediate_size");
    reader.only("qkv_bias", true);
  }
  if (!mixtral) experts.dense_layers = read_dense_layers(reader, config.layers);
  if (static_cast<std::int64_t>(experts.dense_layers.size()) == config.layers)
    reader.bad_value("decoder_sparse_step", "one that leaves a layer with experts");
  reader.only("router_jitter_noise", 0.0);
  reader.only("output_router_logits", false);    // the loss of transformers would have a balance term
  reader.number("router_aux_loss_coef", 0.001);  // by which that is weighted
}

void write_experts(ordered_json& object, const DecoderConfig& config) {
  const ExpertsShape& experts = config.experts;
  object["num_experts_per_tok"] = experts.per_token;
  object["output_router_logits"] = false;
  if (config.family == "mixtral") {
    object["num_local_experts"] = experts.count;
    object["intermediate_size"] = experts.feed_forward;
    return;
  }
  if (config.family == "dots1") {
    object["n_routed_experts"] = experts.count;
    object["moe_intermediate_size"] = experts.feed_forward;
    object["n_shared_experts"] = experts.shared_feed_forward / experts.feed_forward;
    object["norm_topk_prob"] = experts.normalise;
    object["n_group"] = experts.groups;
    object["topk_group"] = experts.groups_per_token;
    object["routed_scaling_factor"] = experts.scale;
    object["first_k_dense_replace"] = experts.dense_layers.size();
    return;
  }
  object["num_experts"] = experts.count;
  object["moe_intermediate_size"] = experts.feed_forward;
  object["norm_topk_prob"] = experts.normalise;
  object["decoder_sparse_step"] = 1;
  object["mlp_only_layers"] = experts.dense_layers;
  if (experts.shared_feed_forward > 0) {
    object["shared_expert_intermediate_size"] = experts.shared_feed_forward;
    object["qkv_bias"] = true;
  }
}

bool is_stacked(const std::string& parameter) {
  return parameter.find(kStacked) != std::string::npos;
}

std::string name_in_file(const DecoderConfig& config, const std::string& parameter, std::int64_t expert) {
  const bool mixtral = config.family == "mixtral";
  if (!is_stacked(parameter)) {
    const auto at = parameter.find(kRouter);
    if (!mixtral || at == std::string::npos) return parameter;
    return parameter.substr(0, at) + ".block_sparse_moe.gate.weight";
  }
  const auto at = parameter.find(kStacked);
  const std::string prefix = parameter.substr(0, at), role = parameter.substr(at + kStacked.size());
  if (!mixtral) return fmt::format("{}.mlp.experts.{}.{}.weight", prefix, expert, role);
  const char* numbered = role == "gate_proj" ? "w1" : role == "up_proj" ? "w3" : "w2";
  return fmt::format("{}.block_sparse_moe.experts.{}.{}.weight", prefix, expert, numbered);
}

std::pair<std::string, int> fused_name(const std::string& parameter) {
  const auto at = parameter.find(kStacked) + kStacked.size();
  const std::string prefix = parameter.substr(0, at), role = parameter.substr(at);
  if (role == "down_proj") return {parameter, -1};
  return {prefix + "gate_up_proj", role == "gate_proj" ? 0 : 1};
}

TensorStream by_expert(const DecoderConfig& config, const TensorStream& weights) {
  TensorStream stream;
  std::vector<bool> stacked;
  for (const TensorStream::Entry& entry : weights.entries) {
    stacked.push_back(is_stacked(entry.name));
    if (!stacked.back()) {
      stream.entries.push_back({name_in_file(config, entry.name), entry.dtype, entry.shape});
      continue;
    }
    for (std::int64_t expert = 0; expert < entry.shape.front(); ++expert)
      stream.entries.push_back({name_in_file(config, entry.name, expert),
                                entry.dtype,
                                {entry.shape.begin() + 1, entry.shape.end()}});
  }
  stream.each = [each = weights.each, stacked](const TensorStream::Take& take) {
    std::size_t next = 0;
    each([&](const at::Tensor& tensor) {
      if (!stacked.at(next++)) return take(tensor);
      for (std::int64_t expert = 0; expert < tensor.size(0); ++expert) take(tensor[expert]);
    });
  };
  return stream;
}

}  // namespace isograd
