// Where axes meet: for a configuration which operators a decoder gets, where its parameters lie, which
// schedule runs it, and what does not go together. Rooms of axes do not know one another; a new axis adds its
// lines here, to config_table.cpp, and to nothing else.
#pragma once

#include <memory>

#include "isograd/model.hpp"
#include "isograd/parameters.hpp"
#include "isograd/pipeline_parallel.hpp"
#include "train/config.hpp"

namespace isograd {

// ConfigErrors, each with the nearest that goes: experts dealt to ranks of a model that has none, or too few.
void check_experts_dealt(const RunConfig& config);
// Likewise, of stages and of what ranks along tp deal among themselves.
void check_decoder_cut(const RunConfig& config);

// Where each parameter of a decoder lies: cut along tp, then experts along ep, then layers along pp.
Layout::Named decoder_placements(DecoderLM& model, const RunConfig& config, const Grid& grid);

// The same, made: the model keeps this rank's parts, with operators in their places that exchange the rest.
struct ComposedDecoder {
  Layout layout;
  std::shared_ptr<Pipeline> pipeline{};  // null: parallel.pp is 1
};
ComposedDecoder compose_decoder(DecoderLM& model, const RunConfig& config, const Mesh& mesh);

// Attention over the ranks that share samples (cp_ring, cp_ulysses), where there are any, on the heads that
// tp has left to each.
void attend_over(DecoderLM& model, const Mesh& mesh);

}  // namespace isograd
