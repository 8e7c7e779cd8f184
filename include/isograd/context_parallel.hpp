// Context parallelism: the tokens of a batch are cut over ranks, and attention reaches across the cut. Ring
// attention, Ulysses and any product of them; parameters' gradients are summed over these ranks like over all
// data axes.
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

// ---- cutting the batch ----

struct CutOptions {
  int ring = 1, ulysses = 1;
  bool causal = true;
  // Level the ranks' costs: documents go whole to the rank with the least work, longest first, and the
  // longest are cut over all ring ranks until costs differ by less than `tolerance`. A document that is cut
  // is dealt in 2 · ring chunks, rank r getting the r-th and the r-th last (causal), or in `ring` chunks.
  // Off: the row of all documents is dealt like that as if it were one.
  bool level = true;
  double tolerance = 0.05;
  // What a token costs besides attention, in scores: the model's other work. 6 · hidden for a decoder whose
  // feed-forward is 2.7 times as wide (12 · hidden² multiplications a token, 2 · hidden a score).
  std::int64_t token_cost = 0;
  // Fill every rank's part up to the longest one's length, rounded up to a multiple of this, with tokens
  // that carry no loss. 0: nothing is padded, parts may differ and be empty; nothing in isograd needs
  // padding.
  std::int64_t pad_to_multiple = 0;
  std::int64_t most_tokens = 0;  // that a rank has memory for, padding included; 0: no limit
};

// Where the documents of a batch go, for all ranks alike; no communication. Every document's tokens stay in
// order within a rank. Empty documents go to rank 0. ConfigError: cu_seqlens that do not ascend from 0, sizes
// below 1, more tokens on a rank than `most_tokens` (says which document, and how many ranks would do).
ContextCut cut_documents(const std::vector<std::int64_t>& cu_seqlens, const CutOptions& options);

// Rank `rank`'s part: its pieces are fragments of the sample they were cut from, with its id, its number of
// targets in the step, its targets (shifted before the cut) and its positions. ConfigError when the batch
// contradicts itself or was cut already.
Batch cut_batch(const Batch& whole, const ContextCut& cut, int rank);
// Each batch by a cut of its own.
MicroBatches cut_micro_batches(const MicroBatches& whole, const CutOptions& options, int rank);

// What a cut costs each ring rank (of its Ulysses group together), for people and for tests.
struct CutCost {
  std::vector<std::int64_t> tokens;  // [ring]
  std::vector<std::int64_t> scores;  // [ring]
  std::int64_t documents_cut = 0;    // that lie on several ring ranks
  std::int64_t padding = 0;          // tokens over all ranks
  double imbalance = 1;              // the highest cost over the mean one
};
CutCost cost_of(const ContextCut& cut, const CutOptions& options);
std::string describe(const CutCost& cost);  // one line

// ---- attention ----

// The ranks that share samples. Groups apart from those that sum gradients, though they may hold the same
// ranks: an exchange of attention in backward is not ordered among the reductions that backward launches.
struct ContextGroups {
  Group context = Group::solo();  // ring x ulysses, Ulysses inside
  Group ring = Group::solo();     // the same place in each Ulysses group
  Group ulysses = Group::solo();  // the same place in the ring
};
// Along cp_ring and cp_ulysses. The first call for a mesh is collective over the context ranks.
ContextGroups context_groups(const Mesh& mesh);

// Attention over the context ranks, to be given to a model (DecoderLM::set_attention). Copyable.
//
// Ulysses first: an all-to-all turns [T_local, H] into the tokens of the Ulysses group with H / ulysses heads
// (a key head goes to every rank that needs it, once). Then the ring: queries stay, keys and values travel to
// the right while the ones at hand are computed, in a second buffer; only the pieces that some rank further
// on needs are sent, and blocks that no local document needs are not computed. Outputs merge by log-sum-exp.
// In backward keys and values travel again, and their gradients after them. Memory is O(T_local · H) a rank.
//
// Collective over the context ranks, forward and backward alike: every rank makes the same calls and comes to
// backward, a rank without tokens too (its loss must hang on the model's output).
class ContextAttention {
 public:
  explicit ContextAttention(const ContextGroups& groups, bool causal = true);
  explicit ContextAttention(const Mesh& mesh, bool causal = true)
      : ContextAttention(context_groups(mesh), causal) {}

  // q [T_local, H, D], k and v [T_local, Hkv, D] at the places that batch.cut says; [T_local, H, D].
  // Differentiable once. ConfigError, at every call, when heads do not divide by the Ulysses ranks, or key
  // heads neither divide by them nor they by key heads (with the nearest possible sizes). With each new cut
  // ranks compare what they were given (one all-gather): ConfigError, on all ranks, when shapes, types or
  // cuts differ, or a rank refuses what it was given by itself; that rank says why, the others which rank.
  // Later calls with that cut are not compared: a rank that refuses one is alone with it.
  at::Tensor operator()(const Batch& batch, const at::Tensor& q, const at::Tensor& k,
                        const at::Tensor& v) const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

// The Ulysses sizes that these heads allow.
std::vector<int> possible_ulysses(std::int64_t heads, std::int64_t key_value_heads);

// The naive twin: all keys and values gathered on every rank, one mask, one softmax.
at::Tensor naive_context_attention(Group context, const Batch& batch, const at::Tensor& q,
                                   const at::Tensor& k, const at::Tensor& v, bool causal = true);

}  // namespace isograd
