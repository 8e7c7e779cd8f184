#include "model/mixture.hpp"

#include <ATen/ops/sigmoid.h>

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
                              const at::Tensor& x, const Choose& choose, const ModelSeams& seams) {
  const auto of_all_tokens = [&](const at::Tensor& weight) {
    const at::Tensor own = linears(stream, {weight}, {at::Tensor()})[0];
    return seams.all_tokens ? seams.all_tokens(own, x.size(0)) : own;
  };
  const auto used = [&](const at::Tensor& same) { return seams.use ? seams.use(same) : same; };
  const at::Tensor logits = of_all_tokens(mixture.router);
  const Routing routing = route(logits, shape, mixture.selection_bias, choose);
  const ByExpert order = sort_by_expert(routing.chosen, shape.count);
  const auto compute = [&mixture](const at::Tensor& rows, const std::vector<std::int64_t>& begin) {
    return compute_experts(rows, mixture.gate, mixture.up, mixture.down, begin);
  };
  const at::Tensor copies = copy_to_experts(x, order);
  const at::Tensor rows =
      seams.experts ? seams.experts(copies, order.begin, compute) : compute(copies, order.begin);
  at::Tensor sum = add_by_weight(rows, used(routing.weights), order);
  if (mixture.shared_gate.weight.defined()) {
    const auto inner =
        linears(x, {mixture.shared_gate.weight, mixture.shared_up.weight}, {at::Tensor(), at::Tensor()});
    at::Tensor shared = linears(swiglu(inner[0], inner[1]), {mixture.shared_down.weight}, {at::Tensor()})[0];
    if (mixture.shared_switch.defined())
      shared = used(at::sigmoid(of_all_tokens(mixture.shared_switch))) * shared;
    sum = sum + shared;
  }
  return {seams.leave ? seams.leave(sum) : sum, logits, routing.chosen};
}

}  // namespace isograd
