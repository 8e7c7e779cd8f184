// Expert parallelism: the experts of a mixture are sharded over ranks that each see their own tokens.
#pragma once

#include "isograd/error.hpp"

#include <cstdint>
#include <string>
#include <vector>

#include "isograd/parameters.hpp"

namespace isograd {

class DecoderLM;

// Experts are sharded along this factor of a view: grid.viewed({"dp_shard"}, {{"edp", 2}, {"ep", 4}}).
inline constexpr const char* kExpertAxis = "ep";
// Name of the group along it that carries only tokens to experts and back (Mesh::along).
inline constexpr const char* kExpertGroup = "experts";

// Work that overlaps with the travel of tokens to their experts. Does not change gradients.
enum class ExpertOverlap {
  kNone,
  kShared,  // the shared expert, where the model has one
  kHalves,  // also one half of the tokens while the other half travels; products have half as many rows
};
// "none", "shared", "halves"; ConfigError: another name.
ExpertOverlap expert_overlap_named(const std::string& name);
struct ExpertParallelOptions {
  ExpertOverlap overlap = ExpertOverlap::kNone;  // no speed-up has been measured: docs/experts.md
};

// Collective over all ranks. ConfigError on each with the first rule by which they would route differently.
void check_same_routing(const DecoderLM& model, const Mesh& mesh, const ExpertParallelOptions& options = {});

// Shards the experts of each layer along `ep`, in order and as even as possible; the rest stays whole. Its
// forward and backward are then collective over these ranks: every rank makes as many of both, with tokens or
// without (DataParallel::needs_even_micro_batches()), with a loss that depends on the model's outputs.
// Collective over mesh.all(), when the model has its values, the same on all ranks, before anything keeps its
// tensors. `others`: placements of cut_decoder(). ConfigError: more ranks than experts, and what
// check_same_routing() refuses.
Layout shard_experts(DecoderLM& model, const Mesh& mesh, Layout::Named others = {},
                     const ExpertParallelOptions& options = {});
// The same placements, for a model that is still whole. Pure; the same errors.
Layout::Named expert_placements(DecoderLM& model, const Grid& grid, Layout::Named others = {});

// Figures that determine the traffic between ranks along `ep` in a step.
struct ExpertTrafficPlan {
  // [ranks along ep][experts]: how often a rank's tokens choose an expert, over all layers and micro-batches.
  std::vector<std::vector<std::int64_t>> choices{};
  std::int64_t hidden = 0, bytes = 4;  // of a token: number of elements, and bytes of each
  std::int64_t exchanges = 0;          // layers with experts · micro-batches (empty ones too) · parts
  int forwards = 1;  // per micro-batch: one more with activation checkpointing, one more with a pass ahead
};
// Bytes that `rank` sends along ep (docs/experts.md).
std::int64_t expert_traffic_bytes(const ExpertTrafficPlan& plan, int rank);

}  // namespace isograd
