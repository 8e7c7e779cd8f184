// Context parallelism: a batch's tokens are split over ranks, and attention reaches across them by ring
// attention, Ulysses or any product of both (docs/context-parallelism.md).
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
  // Whole documents go to the rank with the least work, longest first. The longest are split over all ring
  // ranks until costs differ by less than `tolerance`: in 2 · ring chunks, of which rank r gets the r-th and
  // the r-th last (causal), or in `ring`. Off: all documents are split as if they were one.
  bool level = true;
  double tolerance = 0.05;
  std::int64_t token_cost = 0;  // of a token outside attention, in scores: 6 · hidden for a usual decoder
  std::int64_t pad_to_multiple = 0;  // pads parts to the longest, rounded up; 0: no padding; nothing needs it
  std::int64_t most_tokens = 0;  // limit of a rank, with padding, for its memory; 0: no limit
};

// Which rank gets which part of each document. Pure. ConfigError: cu_seqlens that do not ascend from 0, sizes
// below 1, more than `most_tokens` on a rank (names the document, and how many ranks suffice).
ContextCut cut_documents(const std::vector<std::int64_t>& cu_seqlens, const CutOptions& options);

// The part of `rank`, as fragments. ConfigError: a batch that contradicts itself or was split already.
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

// Groups of their own: attention's exchanges in backward are not ordered with reductions launched there.
struct ContextGroups {
  Group context = Group::solo();  // ring x ulysses, Ulysses inside
  Group ring = Group::solo();     // the same place in each Ulysses group
  Group ulysses = Group::solo();  // the same place in the ring
};
// The first call for a mesh is collective over the context ranks (cp_ring and cp_ulysses).
ContextGroups context_groups(const Mesh& mesh);

// Attention over the context ranks, for DecoderLM::set_attention. Copyable. Ulysses first: an all-to-all
// turns [T_local, H] into its group's tokens with H / ulysses heads. Then the ring: queries stay, keys and
// values that a later rank needs travel while the current ones are computed; outputs merge by log-sum-exp. In
// backward keys and values travel again, followed by their gradients. Memory is O(T_local · H). Collective,
// forward and backward, also for a rank without tokens (its loss must depend on the output).
class ContextAttention {
 public:
  explicit ContextAttention(const ContextGroups& groups, bool causal = true);
  explicit ContextAttention(const Mesh& mesh, bool causal = true)
      : ContextAttention(context_groups(mesh), causal) {}

  // q [T_local, H, D], k and v [T_local, Hkv, D], placed as batch.cut says -> [T_local, H, D]. Differentiable
  // once. ConfigError: heads that do not divide (names the nearest sizes). With each new cut the ranks
  // compare their inputs in one all-gather (ConfigError on all); a rank that refuses a later one fails alone.
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
