// The one place where axes meet. For a configuration it chooses the operators of a decoder, the placement
// of its parameters and its schedule, and refuses combinations that do not work. The folders of the axes do
// not include one another; a new axis adds its lines here and to config_table.cpp, and nowhere else.
#pragma once

#include <memory>

#include "isograd/model.hpp"
#include "isograd/parameters.hpp"
#include "isograd/pipeline_parallel.hpp"
#include "train/config.hpp"

namespace isograd {

// ConfigError: experts sharded over ranks of a model that has none, or fewer experts than ranks. The
// message names the nearest valid configuration.
void check_expert_parallel(const RunConfig& config);
// ConfigError: more stages than layers, or more tensor-parallel ranks than heads or features.
void check_decoder_parallel(const RunConfig& config);

// Placement of each parameter of a decoder: sharded along tp, then experts along ep, then layers along pp.
Layout::Named decoder_placements(DecoderLM& model, const RunConfig& config, const Grid& grid);

// Applies these placements: the model keeps this rank's shards, and operators that exchange the rest are
// installed.
struct ComposedDecoder {
  Layout layout;
  std::shared_ptr<Pipeline> pipeline{};  // null: parallel.pp is 1
};
ComposedDecoder compose_decoder(DecoderLM& model, const RunConfig& config, const Mesh& mesh);

// Installs attention over the ranks that share samples (cp_ring, cp_ulysses), if there are any. Each rank
// computes it on the heads that tp leaves to it.
void attend_over(DecoderLM& model, const Mesh& mesh);

}  // namespace isograd
