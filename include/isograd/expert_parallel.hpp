// Expert parallelism: the experts of a mixture are sharded over ranks that each see their own tokens.
#pragma once

#include "isograd/error.hpp"

#include <cstdint>
#include <string>
#include <vector>

#include "isograd/parameters.hpp"

namespace isograd {

class DecoderLM;

// The axis along which a layer's experts are sharded, a factor of a view of data axes:
// grid.viewed({"dp_shard"}, {{"edp", 2}, {"ep", 4}}).
inline constexpr const char* kExpertAxis = "ep";
// Name of the group along it that carries only tokens to experts and back (Mesh::along).
inline constexpr const char* kExpertGroup = "experts";

// Work that overlaps with the travel of tokens to their experts. Does not change gradients (with kShared not even a
// bit).
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

// Collective over all ranks. ConfigError on each of them, with the first rule, rank and value, where they
// would choose experts by different rules or exchange tokens in another order.
void check_same_routing(const DecoderLM& model, const Mesh& mesh, const ExpertParallelOptions& options = {});

// Shards the experts of each layer over the ranks along `ep`, in order and as evenly as possible; the rest of
// the model stays whole. From then on its forward and backward are collective over these ranks: every rank
// makes as many of both, with tokens or without (DataParallel::needs_even_micro_batches()), and with a loss
// that depends on the model's outputs. Put the layout's placements() into TrainableParameters::placements.
//
// Collective over mesh.all(). Call it when the model has its values, the same on all ranks, and before
// anything keeps its tensors. Without an axis ep, or with one rank along it, it only makes the layout.
// `others`: the placements by which cut_decoder() has sharded the model along tp, each expert's matrices too.
// ConfigError: more ranks along ep than experts, and what check_same_routing() refuses.
Layout deal_experts(DecoderLM& model, const Mesh& mesh, Layout::Named others = {},
                    const ExpertParallelOptions& options = {});
// Returns those placements for a model that is still whole; `others` are those of decoder_placements(). Pure;
// the same errors.
Layout::Named expert_placements(DecoderLM& model, const Grid& grid, Layout::Named others = {});

// Figures that determine the traffic between ranks along `ep` in a step.
struct ExpertTrafficPlan {
  // [ranks along ep][experts]: how often a rank's tokens choose an expert, over all layers and micro-batches.
  std::vector<std::vector<std::int64_t>> choices{};
  std::int64_t hidden = 0, bytes = 4;  // of a token: number of elements, and bytes of each
  std::int64_t exchanges = 0;          // layers with experts · micro-batches (empty ones too) · parts
  int forwards = 1;  // per micro-batch: one more with activation checkpointing, one more with a pass ahead
};
// Bytes that `rank` sends along ep. With S of its tokens' choices on other ranks' experts, R of other ranks'
// tokens on its own, F forwards, X exchanges, E experts and h elements of b bytes:
//   (F + 1) (S + R) h b   rows to experts (S) and back (R), and once more both for the gradients
//   8 F X (ep − 1) E      numbers of rows for each expert
std::int64_t expert_traffic_bytes(const ExpertTrafficPlan& plan, int rank);

}  // namespace isograd
