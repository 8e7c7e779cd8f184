// Deliberately plain, and deliberately not built from the product's parts: an error in the normaliser, a
// reducer, the norm or the cross entropy cannot be in here as well.
#include "verify/oracle.hpp"

#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <map>

namespace isograd {

namespace {

// A batch's weights, 0 where a target carries no loss.
at::Tensor valid_weights(const Batch& batch) {
  const at::Tensor valid = batch.targets.ne(kIgnoreIndex).to(at::kDouble);
  return batch.weights.defined() ? at::where(valid.ne(0), batch.weights.to(at::kDouble), valid) : valid;
}

// What a part of the batch adds up to.
struct Sums {
  double targets = 0, weights = 0, samples = 0;
  std::map<std::int64_t, double> sample_weights;
  double of(const DeclaredLoss& declared) const {
    if (declared.mean == Mean::kSamples) return samples;
    if (declared.mean == Mean::kWeights) return weights;
    if (declared.mean == Mean::kTargets) return targets;
    return targets > 0 ? 1 : 0;
  }
};

Sums sums_of(const MicroBatches& part) {
  Sums sums;
  for (const auto& batch : part) {
    const at::Tensor weights = valid_weights(batch);
    sums.targets += batch.targets.ne(kIgnoreIndex).sum().item<double>();
    sums.weights += weights.sum().item<double>();
    for (std::size_t f = 0; f < batch.sample_ids.size(); ++f)
      sums.sample_weights[batch.sample_ids[f]] +=
          weights.slice(0, batch.cu_seqlens[f], batch.cu_seqlens[f + 1]).sum().item<double>();
  }
  for (const auto& [id, weight] : sums.sample_weights)
    if (weight > 0) ++sums.samples;
  return sums;
}

// What each token's loss is multiplied by, [T].
at::Tensor token_factors(const Batch& batch, const DeclaredLoss& declared, const Sums& sums) {
  at::Tensor factors = valid_weights(batch);
  if (declared.mean == Mean::kTargets || declared.mean == Mean::kWeights) return factors / sums.of(declared);
  if (declared.mean == Mean::kFixed) return factors / declared.denominator;
  if (declared.mean == Mean::kSamples)
    for (std::size_t f = 0; f < batch.sample_ids.size(); ++f)
      if (const double own = sums.sample_weights.at(batch.sample_ids[f]); own > 0)
        factors.slice(0, batch.cu_seqlens[f], batch.cu_seqlens[f + 1]) /= own * sums.samples;
  return factors;
}

}  // namespace

OracleStep oracle_step(const VerifyModel& model, const std::vector<MicroBatches>& parts,
                       const DeclaredLoss& declared, double max_norm,
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
  double counting_parts = 0;
  for (const auto& part : parts)
    if (sums_of(part).of(declared) > 0) ++counting_parts;
  for (const auto& part : parts) {
    const Sums sums = sums_of(part);
    for (const auto& batch : part) {
      step.figures.targets += batch.targets.ne(kIgnoreIndex).sum().item<std::int64_t>();
      step.figures.tokens += batch.tokens.numel();
      at::Tensor logits = model.logits(batch);
      if (logits.scalar_type() != at::kDouble) logits = logits.to(at::kFloat);
      at::Tensor ignored = batch.targets.eq(kIgnoreIndex).unsqueeze(1);        // [T, 1]
      at::Tensor target = batch.targets.unsqueeze(1).masked_fill(ignored, 0);  // [T, 1]
      at::Tensor nll = -at::log_softmax(logits, 1).gather(1, target).masked_fill(ignored, 0).squeeze(1);
      at::Tensor factors = sums.of(declared) > 0 ? token_factors(batch, declared, sums) : at::zeros_like(nll);
      at::Tensor loss = (nll * (factors / counting_parts).to(nll.scalar_type())).sum();
      auto gradients = torch::autograd::grad({loss}, leaves, {}, false, false, /*allow_unused=*/true);
      for (std::size_t i = 0; i < leaves.size(); ++i)
        if (gradients[i].defined()) step.gradients[i] += gradients[i];
      step.figures.loss += loss.item<double>();
      after_micro_batch();
    }
  }
  double squares = 0;
  for (const auto& gradient : step.gradients)
    squares += gradient.to(at::kDouble).square().sum().item<double>();
  step.figures.norm = std::sqrt(squares);
  if (max_norm > 0) step.figures.clip_coefficient = std::min(1.0, max_norm / (step.figures.norm + 1e-6));
  return step;
}

}  // namespace isograd
