// A layer of experts: a router chooses k of E experts for each token, these compute it, and their outputs are
// added up by the router's weights. Tokens are sorted by expert, each expert's are one group of rows: none is
// dropped or padded, and an expert without tokens costs nothing. Differentiable once.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "isograd/model.hpp"
#include "model/hooks.hpp"
#include "model/parameters.hpp"

namespace isograd {

// (scores, `likeliest` [T, k]) -> [T, k], the experts that compute the tokens. Not given: the likeliest.
using Choose = std::function<at::Tensor(const ExpertScores& scores, const at::Tensor& likeliest)>;

// Scores and weights in fp64 for fp64, otherwise in fp32.
struct Routing {
  at::Tensor scores;   // [T, E], differentiable: probabilities, or sigmoids
  at::Tensor chosen;   // [T, k] int64, the likeliest first; of equally likely ones that with the lower index
  at::Tensor weights;  // [T, k], differentiable
};
// Softmax over all experts, then the best k (Mixtral, arXiv 2401.04088; Qwen2-MoE, Qwen3-MoE), or by
// ExpertsShape::sigmoid. logits [T, E]; `bias` [E], of sigmoid routers. ConfigError: k is not 1 to E.
Routing route(const at::Tensor& logits, const ExpertsShape& shape, const at::Tensor& bias = {},
              const Choose& choose = {});
// [T, E]: each token's scores, differentiable, which add up to 1: of a balance loss.
at::Tensor router_probabilities(const at::Tensor& logits, const ExpertsShape& shape);

// The order of T k copies of tokens by expert, tokens of an expert in their own order.
struct ByExpert {
  std::vector<std::int64_t> begin;  // [E + 1]: rows begin[e] to begin[e + 1] are expert e's
  at::Tensor token;                 // [T k] int64: the token of a row
  at::Tensor choice;                // [T k] int64: the row's place in `chosen`, flattened
  at::Tensor row;                   // [T k] int64: the inverse
};
ByExpert sort_by_expert(const at::Tensor& chosen, std::int64_t experts);

// [T, hidden] -> [T k, hidden], the copies by expert.
at::Tensor copy_to_experts(const at::Tensor& x, const ByExpert& order);
// [T k, hidden] -> [T, hidden]: Σ_j weights[t, j] · the row of token t's j-th expert. Low precision in fp32.
at::Tensor add_by_weight(const at::Tensor& rows, const at::Tensor& weights, const ByExpert& order);

// Projections of the same rows [R, in]: rows begin[g] to begin[g + 1] by weights[g]ᵀ of each of `weights` [G,
// out, in].
std::vector<at::Tensor> grouped_linears(const at::Tensor& x, const std::vector<at::Tensor>& weights,
                                        const std::vector<std::int64_t>& begin);

// The low-rank updates of a layer's gates, ups and downs; null: none.
using ExpertUpdates = std::array<const LowRank*, 3>;

// down[e] (silu(gate[e] x) ∘ up[e] x) for each row x of expert e; gate and up [E, inner, hidden], down [E,
// hidden, inner].
at::Tensor compute_experts(const at::Tensor& rows, const at::Tensor& gate, const at::Tensor& up,
                           const at::Tensor& down, const std::vector<std::int64_t>& begin,
                           const ExpertUpdates& updates = {});

namespace naive_twin {
// The whole layer as a loop over experts, each of which picks its tokens; x [T, hidden].
at::Tensor experts(const at::Tensor& x, const Routing& routing, const at::Tensor& gate, const at::Tensor& up,
                   const at::Tensor& down);
}  // namespace naive_twin

// ---- the experts of one layer of a decoder ----

inline constexpr const char* kSelectionBias = "gate.e_score_correction_bias";

struct Mixture {
  at::Tensor router;                           // [E, hidden]; undefined: the layer has no experts
  at::Tensor gate, up, down;                   // [E, inner, hidden] twice, [E, hidden, inner]
  Linear shared_gate, shared_up, shared_down;  // undefined: no expert that every token goes through
  at::Tensor shared_switch;   // [1, hidden]: how much of it a token takes; undefined: all of it
  at::Tensor selection_bias;  // [E], of a sigmoid router: added to scores where experts are chosen
};

// Between "mlp." and the names of the shared expert's matrices.
inline const char* shared_expert_folder(const DecoderConfig& config) {
  return config.family == "qwen2_moe" ? "shared_expert." : "shared_experts.";
}
// Below `prefix`, by the names that transformers 5 has in memory, but gate and up apart: gate.weight,
// gate.e_score_correction_bias, experts.gate_proj, experts.up_proj, experts.down_proj,
// shared_expert.*_proj.weight (dots1: shared_experts), shared_expert_gate.weight.
Mixture create_mixture(const DecoderConfig& config, const std::string& prefix, ParameterMaker& create);

struct MixtureOutput {
  at::Tensor sum;            // [T, hidden]
  at::Tensor router_logits;  // [T, E]
  at::Tensor chosen;         // [T, k]
};
// Low-rank adapters of a layer: runs of its tokens with the updates of each run's experts (one run under
// dispatch), and those of the shared expert's matrices: y and the updates of its rows, whose inputs are x.
struct AdaptedMixture {
  std::vector<std::pair<std::int64_t, ExpertUpdates>> runs{};  // tokens; empty: no expert is adapted
  std::function<at::Tensor(const at::Tensor& y, const at::Tensor& x, Projection projection)> shared{};
};
// stream [T, hidden], of `tokens` tokens. With hooks `mixture` has this rank's experts or parts of their
// matrices. The router and the switch of the shared expert read the stream, so that all ranks along tp agree;
// under sequence parallelism each rank computes them for its own tokens.
MixtureOutput compute_mixture(const Mixture& mixture, const ExpertsShape& shape, const at::Tensor& stream,
                              std::int64_t tokens, const Choose& choose, const ModelHooks& hooks,
                              const AdaptedMixture& adapted);

}  // namespace isograd
