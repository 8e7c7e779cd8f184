// A layer of experts on one device: a router chooses k of E experts for each token, these compute it, and
// what they give is added up by the router's weights. Tokens are sorted by expert and each expert's are one
// group of rows: none is dropped, none is padded, and an expert without tokens costs nothing. Differentiable
// once.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "isograd/model.hpp"

namespace isograd {

// (scores, `likeliest` [T, k]) -> [T, k], the experts that compute the tokens. Not given: the likeliest.
using Choose = std::function<at::Tensor(const ExpertScores& scores, const at::Tensor& likeliest)>;

// What a router says of T tokens; scores and weights in fp64 for fp64, otherwise in fp32.
struct Routing {
  at::Tensor scores;   // [T, E], differentiable: probabilities, or sigmoids
  at::Tensor chosen;   // [T, k] int64, the likeliest first; of equally likely ones that with the lower index
  at::Tensor weights;  // [T, k], differentiable
};
// Softmax over all experts, then the best k (Mixtral, arXiv 2401.04088; Qwen2-MoE, Qwen3-MoE), or as
// ExpertsShape::sigmoid says. logits [T, E]; `bias` [E], of sigmoid routers. ConfigError: k is not 1 to E.
Routing route(const at::Tensor& logits, const ExpertsShape& shape, const at::Tensor& bias = {},
              const Choose& choose = {});
// [T, E]: each token's scores, differentiable, so that a token's add up to 1: of a balance loss.
at::Tensor router_probabilities(const at::Tensor& logits, const ExpertsShape& shape);

// The order of T k copies of tokens by expert, tokens of an expert in their own order.
struct ByExpert {
  std::vector<std::int64_t> begin;  // [E + 1]: rows begin[e] to begin[e + 1] are expert e's
  at::Tensor token;                 // [T k] int64: whose copy a row is
  at::Tensor choice;                // [T k] int64: at which place of `chosen`, flattened, it was chosen
  at::Tensor row;                   // [T k] int64: the other way round, the row of each place
};
ByExpert sort_by_expert(const at::Tensor& chosen, std::int64_t experts);

// [T, hidden] -> [T k, hidden], the copies by expert.
at::Tensor copy_to_experts(const at::Tensor& x, const ByExpert& order);
// [T k, hidden] -> [T, hidden]: Σ_j weights[t, j] · the row of token t's j-th expert. Low precision in fp32.
at::Tensor add_by_weight(const at::Tensor& rows, const at::Tensor& weights, const ByExpert& order);

// Several projections of the same rows [R, in], by group: rows begin[g] to begin[g + 1] by weights[g]ᵀ of
// each of `weights` [G, out, in].
std::vector<at::Tensor> grouped_linears(const at::Tensor& x, const std::vector<at::Tensor>& weights,
                                        const std::vector<std::int64_t>& begin);

// down[e] (silu(gate[e] x) ∘ up[e] x) for each row x of expert e; gate and up [E, inner, hidden], down [E,
// hidden, inner].
at::Tensor compute_experts(const at::Tensor& rows, const at::Tensor& gate, const at::Tensor& up,
                           const at::Tensor& down, const std::vector<std::int64_t>& begin);

namespace naive_twin {
// The whole layer as a loop over experts, each of which picks its tokens; x [T, hidden].
at::Tensor experts(const at::Tensor& x, const Routing& routing, const at::Tensor& gate, const at::Tensor& up,
                   const at::Tensor& down);
}  // namespace naive_twin

}  // namespace isograd
