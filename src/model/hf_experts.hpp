// Experts in Hugging Face's form: keys of config.json, and the names of their weights. Here an expert's
// weights are stacked over experts, gate and up apart. Files have a tensor for each expert (transformers 4,
// and what transformers 5 saves), or gate and up of all experts in one (transformers 5 in memory); ours have
// the first form.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "isograd/model.hpp"
#include "model/json_reader.hpp"

namespace isograd {

// Of a family that has experts; family, layers and feed_forward are known.
void read_experts(JsonReader& reader, DecoderConfig& config);
void write_experts(nlohmann::ordered_json& object, const DecoderConfig& config);

// "model.layers.0.mlp.experts.gate_proj" and the like.
bool is_stacked(const std::string& parameter);
// A parameter that is not stacked, and expert `expert` of one that is, in files with a tensor for each
// expert.
std::string name_in_file(const DecoderConfig& config, const std::string& parameter, std::int64_t expert = -1);
// The tensor of all experts that a stacked parameter is a part of, and which half of its rows: 0, 1, or -1:
// all.
std::pair<std::string, int> fused_name(const std::string& parameter);

// Stacked weights one expert after another, by the names of files.
TensorStream by_expert(const DecoderConfig& config, const TensorStream& weights);

}  // namespace isograd
