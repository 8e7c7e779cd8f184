#include "model/mixture.hpp"

#include <ATen/ops/cat.h>
#include <ATen/ops/sigmoid.h>
#include <fmt/format.h>

#include "isograd/error.hpp"
#include "model/fused.hpp"

namespace isograd {

Mixture create_mixture(const DecoderConfig& config, const std::string& prefix,
                       const CreateParameter& create) {
  const ExpertsShape& shape = config.experts;
  const std::int64_t hidden = config.hidden, shared = shape.shared_feed_forward;
  Mixture mixture;
  const auto trained = [&](const std::string& name, at::IntArrayRef of) {
    return create(prefix + name, of, true);
  };
  mixture.router = trained("gate.weight", {shape.count, hidden});
  if (shape.sigmoid)
    mixture.selection_bias = create(prefix + kSelectionBias, {shape.count}, /*trained=*/false);
  mixture.gate = trained("experts.gate_proj", {shape.count, shape.feed_forward, hidden});
  mixture.up = trained("experts.up_proj", {shape.count, shape.feed_forward, hidden});
  mixture.down = trained("experts.down_proj", {shape.count, hidden, shape.feed_forward});
  if (shared == 0) return mixture;
  const bool switched = config.family == "qwen2_moe";
  const std::string of_all = switched ? "shared_expert." : "shared_experts.";
  mixture.shared_gate.weight = trained(of_all + "gate_proj.weight", {shared, hidden});
  mixture.shared_up.weight = trained(of_all + "up_proj.weight", {shared, hidden});
  mixture.shared_down.weight = trained(of_all + "down_proj.weight", {hidden, shared});
  if (switched) mixture.shared_switch = trained("shared_expert_gate.weight", {1, hidden});
  return mixture;
}

MixtureOutput compute_mixture(const Mixture& mixture, const ExpertsShape& shape, const at::Tensor& stream,
                              std::int64_t tokens, const Choose& choose, const ModelHooks& hooks) {
  const TensorHooks& tp = hooks.tensor;
  const at::Tensor x = tp.region_input ? tp.region_input(stream, tokens) : stream;
  const auto of_all_tokens = [&](const at::Tensor& weight) {
    const at::Tensor own = linears(stream, {weight}, {at::Tensor()})[0];
    return tp.gather_tokens ? tp.gather_tokens(own, tokens) : own;
  };
  const auto used = [&](const at::Tensor& same) { return tp.copy_to_tp ? tp.copy_to_tp(same) : same; };
  const at::Tensor logits = of_all_tokens(mixture.router);
  const Routing routing = route(logits, shape, mixture.selection_bias, choose);
  const auto compute = [&mixture](const at::Tensor& rows, const std::vector<std::int64_t>& begin) {
    return compute_experts(rows, mixture.gate, mixture.up, mixture.down, begin);
  };
  at::Tensor shared;
  const auto compute_shared = [&] {
    if (!mixture.shared_gate.weight.defined()) return;
    const auto inner =
        linears(x, {mixture.shared_gate.weight, mixture.shared_up.weight}, {at::Tensor(), at::Tensor()});
    shared = linears(swiglu(inner[0], inner[1]), {mixture.shared_down.weight}, {at::Tensor()})[0];
    if (mixture.shared_switch.defined())
      shared = used(at::sigmoid(of_all_tokens(mixture.shared_switch))) * shared;
  };

  const std::vector<std::int64_t> sizes = split_rows(tokens, hooks.experts.parts);
  const auto parts_of = [&](const at::Tensor& of) {
    return sizes.size() == 1 ? std::vector{of} : of.split_with_sizes(sizes);
  };
  std::vector<ByExpert> orders;
  std::vector<ExpertHooks::Copies> copies;
  const auto own = parts_of(x), chosen = parts_of(routing.chosen);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    orders.push_back(sort_by_expert(chosen[i], shape.count));
    copies.push_back({copy_to_experts(own[i], orders[i]), orders[i].begin});
  }
  std::vector<at::Tensor> made;
  if (hooks.experts.dispatch) {
    made = hooks.experts.dispatch(copies, compute, compute_shared);
    ISOGRAD_INVARIANT(
        made.size() == copies.size() && shared.defined() == mixture.shared_gate.weight.defined(),
        fmt::format("{} of {} parts of the tokens, shared expert computed: {}", made.size(), copies.size(),
                    shared.defined()));
  } else {
    for (const auto& part : copies) made.push_back(compute(part.rows, part.begin));
    compute_shared();
  }
  const auto weights = parts_of(used(routing.weights));
  for (std::size_t i = 0; i < made.size(); ++i) made[i] = add_by_weight(made[i], weights[i], orders[i]);
  at::Tensor sum = made.size() == 1 ? made[0] : at::cat(made);
  if (shared.defined()) sum = sum + shared;
  return {tp.region_output ? tp.region_output(sum) : sum, logits, routing.chosen};
}

}  // namespace isograd
