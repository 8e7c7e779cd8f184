// Deliberately plain, and deliberately not built from the product's parts: an error in the normaliser, a
// reducer, the norm or the cross entropy cannot be in here as well.
#include "verify/oracle.hpp"

#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>

namespace isograd {

OracleStep oracle_step(const VerifyModel& model, const MicroBatches& whole, double max_norm,
                       const std::function<void()>& after_micro_batch) {
  OracleStep step;
  std::vector<at::Tensor> leaves;
  for (const auto& [name, tensor] : model.named) {
    if (!tensor.requires_grad()) continue;
    step.names.push_back(name);
    leaves.push_back(tensor);
    step.gradients.push_back(
        at::zeros(tensor.sizes(),
                  tensor.options().dtype(tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat)));
  }
  for (const auto& batch : whole) {
    step.figures.targets += batch.targets.ne(kIgnoreIndex).sum().item<std::int64_t>();
    step.figures.tokens += batch.tokens.numel();
  }
  const double count = static_cast<double>(step.figures.targets);
  for (const auto& batch : whole) {
    at::Tensor logits = model.logits(batch);
    if (logits.scalar_type() != at::kDouble) logits = logits.to(at::kFloat);
    at::Tensor ignored = batch.targets.eq(kIgnoreIndex).unsqueeze(1);        // [T, 1]
    at::Tensor target = batch.targets.unsqueeze(1).masked_fill(ignored, 0);  // [T, 1]
    at::Tensor nll = -at::log_softmax(logits, 1).gather(1, target).masked_fill(ignored, 0);
    at::Tensor loss = nll.sum() / count;
    auto gradients = torch::autograd::grad({loss}, leaves, {}, false, false, /*allow_unused=*/true);
    for (std::size_t i = 0; i < leaves.size(); ++i)
      if (gradients[i].defined()) step.gradients[i] += gradients[i];
    step.figures.loss += loss.item<double>();
    after_micro_batch();
  }
  double squares = 0;
  for (const auto& gradient : step.gradients)
    squares += gradient.to(at::kDouble).square().sum().item<double>();
  step.figures.norm = std::sqrt(squares);
  if (max_norm > 0) step.figures.clip_coefficient = std::min(1.0, max_norm / (step.figures.norm + 1e-6));
  return step;
}

}  // namespace isograd
