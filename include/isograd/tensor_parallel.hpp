// Tensor parallelism: the matrices of a model are sharded over the ranks along `tp`, which hold the same
// batch and compute one loss together. This header has the functions at the boundaries of a parallel region,
// and the sharding of a model of one's own.
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
// from it), a "part" of a sum, or "cut" (split by tokens: sequence parallelism). Each rank seeds its copy of
// the one loss with 1 and runs the same backward; the pairs below keep the sums right. Shoeybi et al. 2019
// call enter and leave f and g; Korthikanti et al. 2022 call the token-split forms g and g-bar. Megatron's
// names are in brackets.
//
//               forward                             | backward
//   enter          same -> in use: identity         | sum over ranks    (copy_to_tensor_parallel_region)
//   leave          part -> same: sum over ranks     | identity          (reduce_from_tensor_parallel_region)
//   leave_cut      part -> cut: reduce-scatter      | all-gather        (reduce_scatter_to_sequence_...)
//   enter_cut      cut -> in use: all-gather        | reduce-scatter    (gather_from_sequence_...)
//   gather_tokens  cut -> same: all-gather          | own rows
//   cut_tokens     same -> cut: own rows            | all-gather        (scatter_to_sequence_...)
//
// A column-parallel product (weight [out, in] sharded by rows) takes a tensor in use and gives this rank's
// features. A row-parallel product (sharded along in) takes those and gives a part; add its bias and a
// residual after leave(). Tokens are dim 0, split by split_rows() unless `rows` says how many each rank has,
// 0 allowed.
//
// Collective over `tp`, forward and backward, in the same order on every rank. With one rank all are the
// identity. The functions of differentiable:: are for ranks that each have their own loss: along tp their
// gradients would be size() times too large.
//
// These functions communicate within backward, while backward also launches reductions. So they use a
// separate group, tensor_group(), whose operations are not ordered with those of other groups.
Group tensor_group(const Mesh& mesh, const std::string& axis = "tp");
at::Tensor enter(Group tp, const at::Tensor& same);
at::Tensor leave(Group tp, const at::Tensor& part);
at::Tensor leave_cut(Group tp, const at::Tensor& part, const Group::Rows& rows = {});
// Without `rows` the ranks exchange their numbers of rows.
at::Tensor enter_cut(Group tp, const at::Tensor& cut, const Group::Rows& rows = {});
at::Tensor gather_tokens(Group tp, const at::Tensor& cut, const Group::Rows& rows = {});
at::Tensor cut_tokens(Group tp, const at::Tensor& same, const Group::Rows& rows = {});

// Turns on checks that tensors are what the table says, by checksums: "same" tensors (inputs of enter and
// cut_tokens, gradients of leave's and gather_tokens' outputs) must be equal on every rank, and parts must
// not. PeerError on every rank otherwise. Applies to all ranks of this process; on by default in a build
// without optimization or where ISOGRAD_CHECK_SEAMS is set. Costs one small collective per call.
void check_seams(bool on);

// How to shard the parameters whose name matches; `*` stands for any characters.
struct CutRule {
  std::string name;
  std::string axis = "tp";  // or a factor of a view of it
  // Sharded along this dimension over the ranks, as evenly as possible in pieces of `unit` rows (e.g. the
  // size of a head); the number of pieces need not be a multiple of the ranks. -1: whole on every rank.
  int dim = -1;
  std::int64_t unit = 1;
  // Sizes of consecutive blocks of the dimension, each sharded separately (e.g. queries, keys and values in
  // one tensor). Not given: one block.
  std::vector<std::int64_t> blocks{};
  // Axes along which ranks hold copies whose gradients must be summed, because each rank works on its own
  // heads or tokens: norms of queries and keys; with sequence parallelism the norms between the products and
  // biases added there; key heads that several ranks' query heads read.
  AxisSet summed{};
};
CutRule cut_along(std::string name, int dim, std::int64_t unit = 1, std::vector<std::int64_t> blocks = {});
CutRule summed_along(std::string name, AxisSet axes = {"tp"});

// Replaces the tensors of sharded parameters by this rank's rows, and returns the layout of all parameters.
// Put its placements() into TrainableParameters::placements. A parameter that no rule matches is equal on all
// ranks along tp and has the same gradient there. Tied parameters are named once. Collective over mesh.all().
// Call it when the model has its values, the same on all ranks, and before anything keeps its tensors.
// ConfigError on every rank, before anything is changed: a rule that matches no parameter (suggests the
// nearest name), two rules that match one, an unknown axis or dimension, blocks that do not add up, fewer
// pieces than ranks along the axis.
Layout cut(const std::vector<std::pair<std::string, at::Tensor>>& named, const Mesh& mesh,
           const std::vector<CutRule>& rules);
Layout cut(torch::nn::Module& model, const Mesh& mesh, const std::vector<CutRule>& rules);
// Returns those placements from shapes alone: `named` is whole. Pure; the same errors.
Layout::Named cut_placements(const std::vector<std::pair<std::string, at::Tensor>>& named, const Grid& grid,
                             const std::vector<CutRule>& rules);

// Which part of the vocabulary this rank's rows of `name` are, an embedding or output matrix [V, H] sharded
// by rows. For embedding_part() and the losses of loss.hpp.
VocabularyShard vocabulary_shard(const Layout& layout, const std::string& name);

// Rows of the tokens that are in this rank's shard [V_local, H] of an embedding, zeros for the others: a
// part, for leave() or leave_cut(). tokens [T] int64 of the whole vocabulary. The row of `pad` gets no
// gradient; -1: no such row.
at::Tensor embedding_part(const at::Tensor& weight, const at::Tensor& tokens, const VocabularyShard& shard,
                          std::int64_t pad = -1);

class DecoderLM;
struct DecoderConfig;

// Work that overlaps with the travel of tokens or their gradients along tp. Does not change the bytes sent.
enum class TensorOverlap {
  kNone,
  // While the gradient of a product's input is summed: the gradients of its weights. Same bits as kNone.
  kWeights,
  // Also, with sequence parallelism: products of this rank's own tokens while others' travel, and a
  // row-parallel weight's gradient by tokens that are here while others come. Sums are split, so bits differ
  // from kNone's, but are the same in every run.
  kTokens
};
// "none", "weights", "tokens"; ConfigError: another name.
TensorOverlap tensor_overlap_named(const std::string& name);

struct TensorParallelOptions {
  // Sequence parallelism: between the products each rank has some of the tokens. Norms and residuals work on
  // these, and reduce-scatter and all-gather replace all-reduce. Off: every rank has all tokens.
  bool sequence_parallel = true;
  // Applies to a decoder's attention and dense networks and to a video model's blocks. The same on all ranks
  // along tp. ConfigError: kTokens without sequence_parallel.
  TensorOverlap overlap = TensorOverlap::kNone;
};

// Shards a decoder over the ranks along `tp`: queries, gate and up are column-parallel, o and down
// row-parallel, embedding and output sharded over the vocabulary. Heads, features and vocabulary rows are
// split as evenly as possible. Key heads go with their query heads where tp divides their number. Where tp is
// a multiple of it and the mesh has the view `tp_heads` x `tp_copies` of tp, they are sharded along tp_heads.
// Otherwise every rank has all key heads and computes those that its query heads read.
//
// From then on the model's forward communicates, and hidden() is in use by each rank, for losses with
// vocabulary(). Collective; call it before a layout is made. Without an axis tp, or with one rank along it,
// it only makes the layout. ConfigError: more ranks than query heads.
Layout cut_decoder(DecoderLM& model, const Mesh& mesh, const TensorParallelOptions& options = {});
// Returns those placements for a model that is still whole. Pure; the same errors.
Layout::Named decoder_placements(DecoderLM& model, const Grid& grid,
                                 const TensorParallelOptions& options = {});
// Adds the view `tp_heads` x `tp_copies` of tp to the grid where several ranks' query heads read each key
// head (tp is a multiple of the key heads and divides the query heads). Otherwise returns it as it is.
Grid with_key_head_view(const Grid& grid, const DecoderConfig& config);

// Shards a video model: queries, keys, values and the feed-forward's first matrix are column-parallel, the
// matrices after them row-parallel. Every rank computes the timestep's embedding. With sequence parallelism
// each rank embeds its own patches, and the velocities are gathered at the end.
class VideoDiT;
Layout cut_video(VideoDiT& model, const Mesh& mesh, const TensorParallelOptions& options = {});
Layout::Named video_placements(VideoDiT& model, const Grid& grid, const TensorParallelOptions& options = {});

// Bytes that `ranks` ranks along tp send one another, all together, for one micro-batch's forward and
// backward with activations of `bytes` each: 4 (2 layers + 1) (ranks - 1) tokens · hidden · bytes for the
// activations, with or without sequence parallelism, and ranks (ranks - 1) tokens · 24 for the loss's
// statistics (32 with smoothed labels).
std::int64_t tensor_traffic_bytes(const DecoderConfig& config, std::int64_t tokens, int ranks,
                                  std::int64_t bytes, bool smoothed_labels = false);

// Bytes that one block's forward keeps for its backward on rank 0 along tp, which keeps most: for T tokens
// and t = T / ranks with sequence parallelism (t = T without), with h query heads, k key heads and f features
// of this rank, and activations of `bytes` each
//   split   2 t hidden                 the stream before each of the two norms
//   whole   2 T hidden                 the normed tokens that enter the products
//   split   T head_dim (2 h + 2 k)     queries, keys, values and attention's output; with norms of queries
//                                      and keys also h + k for the inputs of these norms
//   split   3 T f                      gate, up and their product
// and in fp32 (fp64 with activations of 8 bytes) 2 t for the norms, T h for attention, T (h + k) for norms of
// queries and keys. Where every rank has all key heads (cut_decoder()) k = h: a copy for each query head that
// reads it; only heads that are read are normed.
std::int64_t tensor_activation_bytes(const DecoderConfig& config, std::int64_t tokens, int ranks,
                                     const TensorParallelOptions& options, std::int64_t bytes);

}  // namespace isograd
