// Expert parallelism: the experts of a mixture dealt to ranks that each see tokens of their own.
#pragma once

#include "isograd/layout.hpp"

namespace isograd {

class DecoderLM;

// The axis along which a layer's experts are dealt, a factor of a view of data axes:
// grid.viewed({"dp_shard"}, {{"edp", 2}, {"ep", 4}}).
inline constexpr const char* kExpertAxis = "ep";

// Gives each rank along `ep` of the mesh its experts of each layer, in order and as evenly as possible; the
// rest of the model stays whole. Its forward and backward are collective over these ranks from then on:
// tokens travel to their experts and back, so that every rank makes as many of both, with tokens or without
// (DataParallel::takes_every_round()), and with a loss that depends on the model's outputs. The layout's
// placements() go into TrainableParameters::placements. Collective over mesh.all(): when the model has its
// values, the same on all ranks, and before what keeps its tensors is made. Without an axis ep, or with one
// rank along it, nothing is done but the layout. `others`: the placements by which cut_decoder() has cut the
// model along tp before, each expert's matrices too. ConfigError: more ranks along ep than experts.
Layout deal_experts(DecoderLM& model, const Mesh& mesh, Layout::Named others = {});
// The placements that it declares, while the model is whole; `others` are those of decoder_placements().
// Pure; the same errors.
Layout::Named expert_placements(DecoderLM& model, const Grid& grid, Layout::Named others = {});

}  // namespace isograd
