// Expert parallelism: the experts of a mixture dealt to ranks that each see tokens of their own.
#pragma once

#include "isograd/error.hpp"

#include <cstdint>
#include <string>
#include <vector>

#include "isograd/parameters.hpp"

namespace isograd {

class DecoderLM;

// The axis along which a layer's experts are dealt, a factor of a view of data axes:
// grid.viewed({"dp_shard"}, {{"edp", 2}, {"ep", 4}}).
inline constexpr const char* kExpertAxis = "ep";
// The group along it in which tokens travel to their experts and back (Mesh::along), and nothing else does.
inline constexpr const char* kExpertGroup = "experts";

// What is computed while tokens are on their way to their experts. Of a speed option only: gradients are the
// same, with kShared to the bit.
enum class ExpertOverlap {
  kNone,
  kShared,  // the expert that every token goes through, where the model has one
  kHalves,  // and one half of the tokens while the other one's are; products are of half as many rows
};
// "none", "shared", "halves"; ConfigError: another name.
ExpertOverlap expert_overlap_named(const std::string& name);
struct ExpertParallelOptions {
  ExpertOverlap overlap = ExpertOverlap::kNone;  // no gain has been measured: docs/experts.md
};

// Collective over all ranks. ConfigError on each of them, with the first rule, rank and value, where they
// would choose experts by different rules, or send tokens in another order.
void check_same_routing(const DecoderLM& model, const Mesh& mesh, const ExpertParallelOptions& options = {});

// Gives each rank along `ep` of the mesh its experts of each layer, in order and as evenly as possible; the
// rest of the model stays whole. Its forward and backward are collective over these ranks from then on:
// tokens travel to their experts and back, so that every rank makes as many of both, with tokens or without
// (DataParallel::needs_even_micro_batches()), and with a loss that depends on the model's outputs. The
// layout's placements() go into TrainableParameters::placements. Collective over mesh.all(): when the model
// has its values, the same on all ranks, and before what keeps its tensors is made. Without an axis ep, or
// with one rank along it, nothing is done but the layout. `others`: the placements by which cut_decoder() has
// cut the model along tp before, each expert's matrices too. ConfigError: more ranks along ep than experts,
// and what check_same_routing() refuses.
Layout deal_experts(DecoderLM& model, const Mesh& mesh, Layout::Named others = {},
                    const ExpertParallelOptions& options = {});
// The placements that it declares, while the model is whole; `others` are those of decoder_placements().
// Pure; the same errors.
Layout::Named expert_placements(DecoderLM& model, const Grid& grid, Layout::Named others = {});

// What ranks along `ep` send one another in a step.
struct ExpertTrafficPlan {
  // [ranks along ep][experts]: how often a rank's tokens choose an expert, over all layers and micro-batches.
  std::vector<std::vector<std::int64_t>> choices{};
  std::int64_t hidden = 0, bytes = 4;  // of a token: numbers, and bytes of each
  std::int64_t exchanges = 0;          // layers with experts times micro-batches, empty too, times parts
  int forwards = 1;  // of a micro-batch: with activation checkpointing, and with a pass ahead, one more each
};
// Bytes of `rank` in its exchanges with the ranks of experts. With S of its tokens' choices on other ranks'
// experts, R of other ranks' tokens on its own, F forwards, X exchanges, E experts and h numbers of b bytes:
//   (F + 1) (S + R) h b   rows there (S) and back (R), and once more both for the gradients
//   8 F X (ep − 1) E      ranks tell one another how many of their rows are for each expert
std::int64_t expert_traffic_bytes(const ExpertTrafficPlan& plan, int rank);

}  // namespace isograd
