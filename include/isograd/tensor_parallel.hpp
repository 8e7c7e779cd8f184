// Tensor parallelism: the matrices of a model cut over the ranks along `tp`, which hold the same batch and
// compute one loss together. Functions for the seams between what these ranks have in common and what each of
// them has for itself, and the cut of a model of one's own.
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

// A tensor along tp is the same on all ranks, in use by each for itself, a part of a sum, or cut by tokens.
// Each rank seeds its copy of the one loss with 1 and runs the same backward; the pairs below keep the sums
// right (Shoeybi et al. 2019 call enter and leave f and g; Korthikanti et al. 2022 the cut forms g and
// g-bar).
//
//               forward                             | backward
//   enter          same -> in use: identity         | sum over ranks
//   leave          part -> same: sum over ranks     | identity
//   leave_cut      part -> cut: reduce-scatter      | all-gather
//   enter_cut      cut -> in use: all-gather        | reduce-scatter
//   gather_tokens  cut -> same: all-gather          | own rows
//   cut_tokens     same -> cut: own rows            | all-gather
//
// A column product (weight cut by rows of [out, in]) takes what is in use and gives this rank's features; a
// row product (cut along in) takes these and gives a part: its bias and a residual are added after leave().
// Tokens are dim 0, dealt by split_rows() unless `rows` says how many each rank has, 0 allowed.
//
// Collective over `tp`, forward and backward, in the same order on every rank. With one rank all are the
// identity. The functions of differentiable:: are for ranks that each have a loss of their own: along tp
// their gradients come out size() times too large.
//
// Seams communicate within backward, beside the reductions that backward launches: they take a group of their
// own, tensor_group(), whose operations need no common order with those of others.
Group tensor_group(const Mesh& mesh, const std::string& axis = "tp");
at::Tensor enter(Group tp, const at::Tensor& same);
at::Tensor leave(Group tp, const at::Tensor& part);
at::Tensor leave_cut(Group tp, const at::Tensor& part, const Group::Rows& rows = {});
// Without `rows` the ranks ask one another how many each has.
at::Tensor enter_cut(Group tp, const at::Tensor& cut, const Group::Rows& rows = {});
at::Tensor gather_tokens(Group tp, const at::Tensor& cut, const Group::Rows& rows = {});
at::Tensor cut_tokens(Group tp, const at::Tensor& same, const Group::Rows& rows = {});

// Whether the seams hold their tensors to what they are said to be, by checksums: what is the same (the
// inputs of enter and cut_tokens, the gradients of leave's and gather_tokens' outputs) is the same on every
// rank, what is a part is not. PeerError on every rank otherwise. Of all ranks of this process; on from the
// start in a build without optimization, or where ISOGRAD_CHECK_SEAMS is set. One small collective for each
// seam.
void check_seams(bool on);

// What becomes of the parameters whose name matches: `*` stands for any characters.
struct CutRule {
  std::string name;
  std::string axis = "tp";  // or a factor of a view of it
  // Dealt to the ranks along this dimension, as evenly as possible in pieces of `unit` rows (the size of a
  // head); their number need not be a multiple of the ranks'. -1: whole on every rank.
  int dim = -1;
  std::int64_t unit = 1;
  // The dimension consists of these one after another, each cut by itself (queries, keys and values in one
  // tensor). Not given: one.
  std::vector<std::int64_t> blocks{};
  // Axes along which ranks hold copies whose gradients are parts of the whole one, because each works on this
  // rank's heads or tokens alone: norms of queries and keys; under cut tokens the norms between the products,
  // and biases added there; key heads that several ranks' query heads read.
  AxisSet summed{};
};
CutRule cut_along(std::string name, int dim, std::int64_t unit = 1, std::vector<std::int64_t> blocks = {});
CutRule summed_along(std::string name, AxisSet axes = {"tp"});

// Replaces the tensors of parameters that a rule cuts by this rank's rows, and returns the layout of all of
// them; its placements() go into TrainableParameters::placements. A parameter that no rule matches is the
// same on all ranks along tp and has the same gradient there. Collective over mesh.all(): when the model has
// its values, the same on all ranks, and before what keeps its tensors is made. Tied parameters are named
// once. ConfigError on every rank, before anything is changed: a rule that matches no parameter (the nearest
// name is suggested), two rules that match one, an axis or a dimension that there is none of, blocks that do
// not add up, pieces of a dimension that are fewer than the ranks along the axis.
Layout cut(const std::vector<std::pair<std::string, at::Tensor>>& named, const Mesh& mesh,
           const std::vector<CutRule>& rules);
Layout cut(torch::nn::Module& model, const Mesh& mesh, const std::vector<CutRule>& rules);
// The placements that it declares, from shapes alone: `named` is whole. Pure; the same errors.
Layout::Named cut_placements(const std::vector<std::pair<std::string, at::Tensor>>& named, const Grid& grid,
                             const std::vector<CutRule>& rules);

// Which of a vocabulary this rank's rows of `name` are, an embedding or output matrix [V, H] cut along its
// rows: for embedding_part() and the losses of loss.hpp.
VocabularyShard vocabulary_shard(const Layout& layout, const std::string& name);

// The rows of the tokens that this rank's part [V_local, H] of an embedding has, zeros for the others: a
// part, for leave() or leave_cut(). tokens [T] int64 of the whole vocabulary. The row of `pad` gets no
// gradient; -1: there is none.
at::Tensor embedding_part(const at::Tensor& weight, const at::Tensor& tokens, const VocabularyShard& shard,
                          std::int64_t pad = -1);

class DecoderLM;
struct DecoderConfig;

// What is computed while tokens or their gradients travel between the ranks of tp.
enum class TensorOverlap {
  kNone,
  // While the gradient of what entered a product is summed: those of its weights. The same bits as kNone.
  kWeights,
  // That, and of cut tokens: products of this rank's own while others' come or go, and the gradient of a row
  // product's weight by tokens that are here while others come. Products of fewer rows, and sums of several
  // of them: other bits than kNone's, the same in every run. Bytes sent are the same.
  kTokens
};
// ConfigError: another name than none, weights, tokens.
TensorOverlap tensor_overlap_named(const std::string& name);

struct TensorParallelOptions {
  // Between the products each rank has some of the tokens: norms and residuals work on these, and
  // reduce-scatter and all-gather take the place of all-reduce. Off: every rank has all of them.
  bool sequence_parallel = true;
  // Of a decoder's attention and dense networks and a video model's blocks. The same on all ranks along tp.
  // ConfigError: kTokens without sequence_parallel.
  TensorOverlap overlap = TensorOverlap::kNone;
};

// Cuts a decoder over the ranks along `tp` of the mesh: queries, gate and up by their outputs, o and down by
// their inputs, embedding and output over the vocabulary; heads, features and tokens of the vocabulary are
// dealt as evenly as possible. Key heads go with their query heads where tp divides their number; where tp is
// a multiple of it and the mesh has the view `tp_heads` x `tp_copies` of tp they are cut along tp_heads, and
// otherwise every rank has all of them and computes those that its query heads read. Its forward communicates
// from then on, and hidden() is in use by each rank, for losses with vocabulary(). Collective, before a
// layout is made. Without an axis tp, or with one rank along it, nothing is done but the layout. ConfigError:
// more ranks than query heads.
Layout cut_decoder(DecoderLM& model, const Mesh& mesh, const TensorParallelOptions& options = {});
// The placements that it declares, while the model is whole. Pure; the same errors.
Layout::Named decoder_placements(DecoderLM& model, const Grid& grid,
                                 const TensorParallelOptions& options = {});
// The grid with the view `tp_heads` x `tp_copies` of tp, where several ranks' query heads read each key head:
// tp is a multiple of the key heads and divides the query heads. Otherwise as it is.
Grid with_key_head_view(const Grid& grid, const DecoderConfig& config);

// Cuts a video model likewise: queries, keys, values and the feed-forward's first matrix by their outputs,
// the matrices behind them by their inputs. What a timestep becomes is computed by every rank. With cut
// tokens each rank embeds its own patches, and the velocities are gathered at the end.
class VideoDiT;
Layout cut_video(VideoDiT& model, const Mesh& mesh, const TensorParallelOptions& options = {});
Layout::Named video_placements(VideoDiT& model, const Grid& grid, const TensorParallelOptions& options = {});

// What `ranks` ranks along tp send one another, all together, for one micro-batch's forward and backward with
// activations of `bytes` each: 4 (2 layers + 1) (ranks - 1) tokens · hidden · bytes at the seams, cut tokens
// or not, and ranks (ranks - 1) tokens · 24 for the loss's statistics (32 with smoothed labels).
std::int64_t tensor_traffic_bytes(const DecoderConfig& config, std::int64_t tokens, int ranks,
                                  std::int64_t bytes, bool smoothed_labels = false);

// What the forward of one block keeps for its backward on rank 0 of `ranks` along tp, which has the most: of
// T tokens and t = T / ranks with sequence parallelism (t = T without), with h query heads, k key heads and f
// features of this rank's and activations of `bytes` each
//   cut     2 t hidden                 the stream before each of the two norms
//   whole   2 T hidden                 the normed tokens that enter the products
//   cut     T head_dim (2 h + 2 k)     queries, keys, values, what attention gives; with norms of queries and
//                                      keys h + k more, what these normed
//   cut     3 T f                      gate, up and their product
// and in fp32 (fp64 beside activations of 8 bytes) 2 t for the norms, T h for attention, T (h + k) for norms
// of queries and keys. Where every rank has all key heads (cut_decoder()) k = h, a copy for each query head
// that reads it; normed are those alone that are read.
std::int64_t tensor_activation_bytes(const DecoderConfig& config, std::int64_t tokens, int ranks,
                                     const TensorParallelOptions& options, std::int64_t bytes);

}  // namespace isograd
