// Tensor parallelism: ranks along `tp` hold the same batch and shards of the matrices, and compute one loss.
#pragma once

#include "isograd/error.hpp"

#include <torch/nn/module.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "isograd/group.hpp"
#include "isograd/loss.hpp"
#include "isograd/parameters.hpp"

namespace isograd {

// Along tp a tensor is "same" (equal on all ranks), "in use" (equal, and each rank computes its own features
// from it), a "part" of a sum, or "split" by tokens (sequence parallelism). Each rank seeds its copy of the
// one loss with 1; these functions at the boundaries of a TP region keep the sums right. Names are Megatron's
// (Shoeybi et al. 2019; Korthikanti et al. 2022):
//
//                              forward                             | backward
//  copy_to_tp                  same -> in use: identity            | sum over ranks
//  reduce_from_tp              part -> same: sum over ranks        | identity
//  reduce_scatter_to_sequence  part -> split: reduce-scatter       | all-gather
//  gather_from_sequence        split -> in use: all-gather         | reduce-scatter
//  gather_tokens               split -> same: all-gather           | own rows
//  split_tokens                same -> split: own rows             | all-gather
//
// A column-parallel product (weight [out, in] sharded by rows) takes a tensor in use; a row-parallel one
// (sharded along in) gives a part: add its bias and a residual after the reduction. Tokens are dim 0, split
// by split_rows() unless `rows` says how many each rank has. Collective over `tp`, forward and backward, in
// the same order; with one rank the identity. They need a group of their own, tensor_group(), since backward
// also launches reductions. Those of differentiable:: are for ranks with a loss each: along tp their
// gradients would be size() times too large.
Group tensor_group(const Mesh& mesh, const std::string& axis = "tp");
at::Tensor copy_to_tp(Group tp, const at::Tensor& same);
at::Tensor reduce_from_tp(Group tp, const at::Tensor& part);
at::Tensor reduce_scatter_to_sequence(Group tp, const at::Tensor& part, const Group::Rows& rows = {});
// Without `rows` the ranks exchange their numbers of rows.
at::Tensor gather_from_sequence(Group tp, const at::Tensor& cut, const Group::Rows& rows = {});
at::Tensor gather_tokens(Group tp, const at::Tensor& cut, const Group::Rows& rows = {});
at::Tensor split_tokens(Group tp, const at::Tensor& same, const Group::Rows& rows = {});

// Checks by checksums that tensors are what the table says (PeerError on every rank), one small collective a
// call, in this process. On by default without optimization or where ISOGRAD_CHECK_SEAMS is set.
void check_tp_regions(bool on);

// How to shard the parameters whose name matches; `*` stands for any characters.
struct CutRule {
  std::string name;
  std::string axis = "tp";  // or a factor of a view of it
  // As even as possible in pieces of `unit` rows (e.g. of a head). -1: whole on every rank.
  int dim = -1;
  std::int64_t unit = 1;
  // Consecutive blocks, each sharded separately (e.g. queries, keys, values). Not given: one.
  std::vector<std::int64_t> blocks{};
  // Axes along which copies' gradients are summed, since each rank works on its own heads or tokens: norms of
  // queries and keys; under sequence parallelism norms and biases between the products.
  AxisSet summed{};
};
CutRule cut_along(std::string name, int dim, std::int64_t unit = 1, std::vector<std::int64_t> blocks = {});
CutRule summed_along(std::string name, AxisSet axes = {"tp"});

// Replaces sharded parameters by this rank's rows and returns the layout; put its placements() into
// TrainableParameters::placements. A parameter without rule is equal along tp, with the same gradient; tied
// ones are named once. Collective over mesh.all(), with the same values on all ranks, before anything keeps
// the tensors. ConfigError on every rank, before anything changes: a rule that matches nothing (suggests the
// nearest name), two rules for one parameter, an unknown axis or dimension, blocks that do not add up, fewer
// pieces than ranks.
Layout cut(const std::vector<std::pair<std::string, at::Tensor>>& named, const Mesh& mesh,
           const std::vector<CutRule>& rules);
Layout cut(const ModuleRef& model, const Mesh& mesh, const std::vector<CutRule>& rules);
// Returns those placements from shapes alone: `named` is whole. Pure; the same errors.
Layout::Named cut_placements(const std::vector<std::pair<std::string, at::Tensor>>& named, const Grid& grid,
                             const std::vector<CutRule>& rules);

// The part of the vocabulary that this rank's rows of `name` [V, H] are, for embedding_part() and losses.
VocabularyShard vocabulary_shard(const Layout& layout, const std::string& name);

// Rows of the tokens [T] in this rank's shard [V_local, H], zeros for the others: a part, for
// reduce_from_tp() or reduce_scatter_to_sequence(). The row of `pad` gets no gradient; -1: no such row.
at::Tensor embedding_part(const at::Tensor& weight, const at::Tensor& tokens, const VocabularyShard& shard,
                          std::int64_t pad = -1);

class DecoderLM;
struct DecoderConfig;

// Work that overlaps with the travel of tokens or their gradients along tp. Does not change the bytes sent.
enum class TensorOverlap {
  kNone,
  // While the gradient of a product's input is summed: the gradients of its weights. Same bits as kNone.
  kWeights,
  // Also, with sequence parallelism: products of own tokens, or a row-parallel weight's gradient by them,
  // while others' travel. Sums are split, so bits differ from kNone's, but are the same in every run.
  kTokens
};
// "none", "weights", "tokens"; ConfigError: another name.
TensorOverlap tensor_overlap_named(const std::string& name);

struct TensorParallelOptions {
  // Sequence parallelism: between the products (norms, residuals) a rank has some of the tokens, and
  // reduce-scatter and all-gather replace all-reduce. Off: every rank has all.
  bool sequence_parallel = true;
  // The same on all ranks along tp. ConfigError: kTokens without sequence_parallel.
  TensorOverlap overlap = TensorOverlap::kNone;
};

// Shards a decoder along `tp`: queries, gate and up column-parallel, o and down row-parallel, embedding and
// output over the vocabulary; heads, features and rows as even as possible. Key heads go with their query
// heads where tp divides their number, along tp_heads where the mesh has that view; otherwise every rank has
// all and computes those it reads. Its forward then communicates and hidden() is in use, for losses with
// vocabulary(). Collective, before a layout is made. ConfigError: more ranks than query heads.
Layout cut_decoder(DecoderLM& model, const Mesh& mesh, const TensorParallelOptions& options = {});
// Returns those placements for a model that is still whole. Pure; the same errors.
Layout::Named decoder_placements(DecoderLM& model, const Grid& grid,
                                 const TensorParallelOptions& options = {});
// Adds the view `tp_heads` x `tp_copies` of tp where several ranks read each key head; else returns the grid.
Grid with_key_head_view(const Grid& grid, const DecoderConfig& config);

// Shards a video model: queries, keys, values and the network's first matrix are column-parallel, those after
// them row-parallel. Under sequence parallelism a rank embeds its own patches; velocities are gathered.
class VideoDiT;
Layout cut_video(VideoDiT& model, const Mesh& mesh, const TensorParallelOptions& options = {});
Layout::Named video_placements(VideoDiT& model, const Grid& grid, const TensorParallelOptions& options = {});

}  // namespace isograd
