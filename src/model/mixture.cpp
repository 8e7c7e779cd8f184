#include "model/mixture.hpp"

#include <ATen/ops/sigmoid.h>

#include "model/fused.hpp"

namespace isograd {

Mixture create_mixture(const DecoderConfig& config, const std::string& prefix,
                       const CreateParameter& create) {
  const ExpertsShape& shape = config.experts;
  const std::int64_t hidden = config.hidden, shared = shape.shared_feed_forward;
  Mixture mixture;
  mixture.router = create(prefix + "gate.weight", {shape.count, hidden});
  mixture.gate = create(prefix + "experts.gate_proj", {shape.count, shape.feed_forward, hidden});
  mixture.up = create(prefix + "experts.up_proj", {shape.count, shape.feed_forward, hidden});
  mixture.down = create(prefix + "experts.down_proj", {shape.count, hidden, shape.feed_forward});
  if (shared == 0) return mixture;
  mixture.shared_gate.weight = create(prefix + "shared_expert.gate_proj.weight", {shared, hidden});
  mixture.shared_up.weight = create(prefix + "shared_expert.up_proj.weight", {shared, hidden});
  mixture.shared_down.weight = create(prefix + "shared_expert.down_proj.weight", {hidden, shared});
  mixture.shared_switch = create(prefix + "shared_expert_gate.weight", {1, hidden});
  return mixture;
}

MixtureOutput compute_mixture(const Mixture& mixture, const ExpertsShape& shape, const at::Tensor& stream,
                              const at::Tensor& x, const RouterOptions::Choose& choose,
                              const ModelSeams& seams) {
  const auto of_all_tokens = [&](const at::Tensor& weight) {
    const at::Tensor own = linears(stream, {weight}, {at::Tensor()})[0];
    return seams.all_tokens ? seams.all_tokens(own, x.size(0)) : own;
  };
  const auto used = [&](const at::Tensor& same) { return seams.use ? seams.use(same) : same; };
  const at::Tensor logits = of_all_tokens(mixture.router);
  const Routing routing =
      route(logits, {.per_token = shape.per_token, .normalise = shape.normalise, .choose = choose});
  const ByExpert order = sort_by_expert(routing.chosen, shape.count);
  const auto compute = [&mixture](const at::Tensor& rows, const std::vector<std::int64_t>& begin) {
    return compute_experts(rows, mixture.gate, mixture.up, mixture.down, begin);
  };
  const at::Tensor copies = copy_to_experts(x, order);
  const at::Tensor rows =
      seams.experts ? seams.experts(copies, order.begin, compute) : compute(copies, order.begin);
  at::Tensor sum = add_by_weight(rows, used(routing.weights), order);
  if (mixture.shared_switch.defined()) {
    const at::Tensor open = used(at::sigmoid(of_all_tokens(mixture.shared_switch)));
    const auto inner =
        linears(x, {mixture.shared_gate.weight, mixture.shared_up.weight}, {at::Tensor(), at::Tensor()});
    sum = sum + open * linears(swiglu(inner[0], inner[1]), {mixture.shared_down.weight}, {at::Tensor()})[0];
  }
  return {seams.leave ? seams.leave(sum) : sum, logits};
}

}  // namespace isograd
