// Context parallelism: the tokens of a batch are split over ranks, and attention reaches across them, by ring
// attention, Ulysses, or any product of the two. Gradients of parameters are summed over these ranks as over
// all data axes.
#pragma once

#include "isograd/error.hpp"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "isograd/batch.hpp"
#include "isograd/group.hpp"
#include "isograd/world.hpp"

namespace isograd {

// ---- splitting the batch ----

struct CutOptions {
  int ring = 1, ulysses = 1;
  bool causal = true;
  // Balances the ranks' costs. Whole documents go to the rank with the least work, longest first. The longest
  // ones are split over all ring ranks until costs differ by less than `tolerance`: in 2 · ring chunks, of
  // which rank r gets the r-th and the r-th last (causal), or in `ring` chunks. Off: all documents together
  // are split as if they were one.
  bool level = true;
  double tolerance = 0.05;
  // Cost of a token outside attention, in scores. 6 · hidden for a decoder whose feed-forward is 2.7 times as
  // wide (12 · hidden² multiplications a token, 2 · hidden a score).
  std::int64_t token_cost = 0;
  // Pads every rank's part with tokens that carry no loss, to the longest part's length rounded up to a
  // multiple of this. 0: no padding; parts may differ and be empty. Nothing in isograd needs padding.
  std::int64_t pad_to_multiple = 0;
  std::int64_t most_tokens = 0;  // limit of a rank, with padding, for its memory; 0: no limit
};

// Computes which rank gets which part of each document. Pure, and the same on all ranks. Tokens of a document
// stay in order within a rank. Empty documents go to rank 0. ConfigError: cu_seqlens that do not ascend from
// 0, sizes below 1, more tokens on a rank than `most_tokens` (names the document, and how many ranks would
// suffice).
ContextCut cut_documents(const std::vector<std::int64_t>& cu_seqlens, const CutOptions& options);

// Returns the part of rank `rank`. Its pieces are fragments with the sample's id, its number of targets in
// the step, its targets (shifted before the split) and its positions. ConfigError when the batch contradicts
// itself or was split already.
Batch cut_batch(const Batch& whole, const ContextCut& cut, int rank);
// Splits each batch separately.
MicroBatches cut_micro_batches(const MicroBatches& whole, const CutOptions& options, int rank);

// Costs of a split for each ring rank (its Ulysses group counted together). For reports and tests.
struct CutCost {
  std::vector<std::int64_t> tokens;  // [ring]
  std::vector<std::int64_t> scores;  // [ring]
  std::int64_t documents_cut = 0;    // split over several ring ranks
  std::int64_t padding = 0;          // tokens over all ranks
  double imbalance = 1;              // the highest cost over the mean one
};
CutCost cost_of(const ContextCut& cut, const CutOptions& options);
std::string describe(const CutCost& cost);  // one line

// ---- attention ----

// The ranks that share samples. These groups are separate from those that sum gradients, even where the ranks
// are the same: attention's exchanges in backward are not ordered with the reductions that backward launches.
struct ContextGroups {
  Group context = Group::solo();  // ring x ulysses, Ulysses inside
  Group ring = Group::solo();     // the same place in each Ulysses group
  Group ulysses = Group::solo();  // the same place in the ring
};
// The first call for a mesh is collective over the context ranks (cp_ring and cp_ulysses).
ContextGroups context_groups(const Mesh& mesh);

// Attention over the context ranks. Give it to a model with DecoderLM::set_attention. Copyable.
//
// Ulysses comes first: an all-to-all turns [T_local, H] into the tokens of the Ulysses group with H / ulysses
// heads (a key head goes once to every rank that needs it). Then the ring: queries stay; keys and values
// travel to the right in a second buffer while the current ones are computed. Only pieces that a later rank
// needs are sent, and only blocks that a local document needs are computed. Outputs merge by log-sum-exp. In
// backward keys and values travel again, followed by their gradients. Memory is O(T_local · H) per rank.
//
// Collective over the context ranks, forward and backward. Every rank makes the same calls and runs backward,
// even a rank without tokens (its loss must depend on the model's output).
class ContextAttention {
 public:
  explicit ContextAttention(const ContextGroups& groups, bool causal = true);
  explicit ContextAttention(const Mesh& mesh, bool causal = true)
      : ContextAttention(context_groups(mesh), causal) {}

  // q [T_local, H, D], k and v [T_local, Hkv, D], placed as batch.cut says; returns [T_local, H, D].
  // Differentiable once. ConfigError at every call when heads do not divide by the Ulysses ranks, or neither
  // of key heads and Ulysses ranks divides the other (names the nearest possible sizes). With each new cut
  // the ranks compare their inputs (one all-gather): ConfigError on all ranks when shapes, types or cuts
  // differ or one rank refuses its input. Later calls with that cut are not compared: a rank that refuses one
  // fails alone.
  at::Tensor operator()(const Batch& batch, const at::Tensor& q, const at::Tensor& k,
                        const at::Tensor& v) const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

// Ulysses sizes that these numbers of heads allow.
std::vector<int> possible_ulysses(std::int64_t heads, std::int64_t key_value_heads);

// Naive twin: gathers all keys and values on every rank; one mask, one softmax.
at::Tensor naive_context_attention(Group context, const Batch& batch, const at::Tensor& q,
                                   const at::Tensor& k, const at::Tensor& v, bool causal = true);

}  // namespace isograd
