// The experts of one layer of a decoder: its weights, and what they make of tokens on one device.
#pragma once

#include <functional>
#include <string>

#include "isograd/model.hpp"
#include "model/experts.hpp"
#include "model/hooks.hpp"
#include "model/parameters.hpp"

namespace isograd {

inline constexpr const char* kSelectionBias = "gate.e_score_correction_bias";

struct Mixture {
  at::Tensor router;                           // [E, hidden]; undefined: the layer has no experts
  at::Tensor gate, up, down;                   // [E, inner, hidden] twice, [E, hidden, inner]
  Linear shared_gate, shared_up, shared_down;  // undefined: no expert that every token goes through
  at::Tensor shared_switch;   // [1, hidden]: how much of it a token takes; undefined: all of it
  at::Tensor selection_bias;  // [E], of a sigmoid router: added to scores where experts are chosen
};

// `trained`: in the model's type, with a gradient; else in fp32 at least, without.
using CreateParameter =
    std::function<at::Tensor(const std::string& name, at::IntArrayRef shape, bool trained)>;
// Below `prefix`, by the names that transformers 5 has in memory, but gate and up apart: gate.weight,
// gate.e_score_correction_bias, experts.gate_proj, experts.up_proj, experts.down_proj,
// shared_expert.*_proj.weight (dots1: shared_experts), shared_expert_gate.weight.
Mixture create_mixture(const DecoderConfig& config, const std::string& prefix, const CreateParameter& create);

struct MixtureOutput {
  at::Tensor sum;            // [T, hidden]
  at::Tensor router_logits;  // [T, E]
  at::Tensor chosen;         // [T, k]
};
// stream [T, hidden], of `tokens` tokens. With hooks `mixture` has this rank's experts or parts of their
// matrices. The router and the switch of the shared expert read the stream, so that all ranks along tp agree;
// under sequence parallelism each rank computes them for its own tokens.
MixtureOutput compute_mixture(const Mixture& mixture, const ExpertsShape& shape, const at::Tensor& stream,
                              std::int64_t tokens, const Choose& choose, const ModelHooks& hooks);

}  // namespace isograd
