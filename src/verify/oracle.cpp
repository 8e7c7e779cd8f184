// Deliberately plain, and deliberately not built from the product's parts: an error in the normaliser, a
// reducer, the norm or the cross entropy cannot be in here as well.
#include "verify/oracle.hpp"

#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "verify/compare.hpp"

namespace isograd {

namespace {

// A batch's weights, 0 where a target carries no loss.
at::Tensor valid_weights(const Batch& batch) {
  const at::Tensor valid = batch.targets.ne(kIgnoreIndex).to(at::kDouble);
  return batch.weights.defined() ? at::where(valid.ne(0), batch.weights.to(at::kDouble), valid) : valid;
}

// The counts of a part of the batch.
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

// The factor of each token's loss, [T].
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

at::Tensor plain_token_losses(const at::Tensor& logits, const Batch& batch, const DeclaredLoss& declared) {
  at::Tensor ignored = batch.targets.eq(kIgnoreIndex);  // [T]
  if (declared.per_token) return declared.per_token(batch, logits).masked_fill(ignored, 0);
  at::Tensor target = batch.targets.masked_fill(ignored, 0).unsqueeze(1);  // [T, 1]
  const at::Tensor logarithms = at::log_softmax(logits, 1);
  at::Tensor losses = -logarithms.gather(1, target).squeeze(1);
  if (const double part = declared.label_smoothing; part != 0)
    losses = (1 - part) * losses - part * logarithms.mean(1);
  if (declared.z_loss != 0) losses = losses + declared.z_loss * logits.logsumexp(1).square();
  return losses.masked_fill(ignored, 0);
}

namespace {

// This micro-batch's share of a loss over tokens.
at::Tensor token_loss(const at::Tensor& logits, const Batch& batch, const DeclaredLoss& declared,
                      const Sums& sums, double counting_parts) {
  at::Tensor nll = plain_token_losses(logits, batch, declared);
  at::Tensor factors = sums.of(declared) > 0 ? token_factors(batch, declared, sums) : at::zeros_like(nll);
  return (nll * (factors / counting_parts).to(nll.scalar_type())).sum();
}

// Not base/pattern.hpp, by which the step under test finds its groups: by the parts of the pattern between
// its stars, each as early in the name as it goes.
bool fits(const std::string& pattern, const std::string& name) {
  std::vector<std::string> parts(1);
  for (const char c : pattern) {
    if (c == '*')
      parts.emplace_back();
    else
      parts.back() += c;
  }
  if (parts.size() == 1) return pattern == name;
  const std::string &first = parts.front(), &last = parts.back();
  if (name.size() < first.size() + last.size() || !name.starts_with(first) || !name.ends_with(last))
    return false;
  std::size_t at = first.size();
  for (std::size_t i = 1; i + 1 < parts.size(); ++i) {
    at = name.find(parts[i], at);
    if (at == std::string::npos) return false;
    at += parts[i].size();
  }
  return at + last.size() <= name.size();
}

void clip_apart(const OracleClip& clip, const std::vector<std::string>& names,
                std::vector<at::Tensor>& gradients) {
  std::vector<double> squares(clip.groups.size() + 1), limits;
  std::vector<std::size_t> group(names.size(), clip.groups.size());
  for (std::size_t i = 0; i < names.size(); ++i) {
    for (std::size_t g = clip.groups.size(); g-- > 0;)
      if (fits(clip.groups[g].pattern, names[i])) group[i] = g;
    squares[group[i]] += gradients[i].to(at::kDouble).square().sum().item<double>();
  }
  for (const ClipGroup& one : clip.groups) limits.push_back(one.max_norm);
  limits.push_back(clip.max_norm);
  for (std::size_t i = 0; i < names.size(); ++i) {
    const double limit = limits[group[i]], norm = std::sqrt(squares[group[i]]);
    if (limit > 0 && norm + 1e-6 > limit) gradients[i] = gradients[i] * (limit / (norm + 1e-6));
  }
}

}  // namespace

std::vector<at::Tensor> dense_gradients(const at::Tensor& scalar, const std::vector<at::Tensor>& leaves) {
  auto gradients = torch::autograd::grad({scalar}, leaves, {}, false, false, /*allow_unused=*/true);
  for (at::Tensor& gradient : gradients)
    if (gradient.defined() && gradient.layout() != at::kStrided) gradient = gradient.to_dense();
  return gradients;
}

OracleStep oracle_step(const VerifyModel& model, const std::vector<MicroBatches>& parts,
                       const DeclaredLoss& declared, const OracleClip& clip,
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
  step.terms.emplace_back(declared.name.empty() ? "cross_entropy" : declared.name, 0);
  for (const auto& term : model.more_terms) step.terms.emplace_back(term.name, 0);
  double all_targets = 0, all_tokens = 0;  // further terms are means over the whole step
  MicroBatches whole;
  for (const auto& part : parts) {
    all_targets += sums_of(part).targets;
    for (const auto& batch : part) all_tokens += static_cast<double>(batch.tokens.numel());
    whole.insert(whole.end(), part.begin(), part.end());
  }
  for (const OracleTerm& term : model.more_terms)
    if (term.prepare) term.prepare(whole), after_micro_batch();
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
      at::Tensor loss = declared.global
                            ? declared.global(logits, batch.targets) / static_cast<double>(part.size())
                            : token_loss(logits, batch, declared, sums, counting_parts);
      step.terms[0].second += loss.item<double>();
      for (std::size_t i = 0; i < model.more_terms.size(); ++i) {
        const OracleTerm& term = model.more_terms[i];
        const double divisor = term.mean == Mean::kNone     ? 1
                               : term.mean == Mean::kTokens ? std::max(1.0, all_tokens)
                                                            : std::max(1.0, all_targets);
        const at::Tensor value = term.sum(batch) / divisor;
        step.terms[i + 1].second += value.item<double>();
        loss = loss + value * term.weight;
      }
      const auto gradients = dense_gradients(loss, leaves);
      for (std::size_t i = 0; i < leaves.size(); ++i)
        if (gradients[i].defined()) step.gradients[i] += gradients[i];
      step.figures.loss += loss.item<double>();
      after_micro_batch();
    }
  }
  for (auto& gradient : step.gradients) gradient = gradient.cpu();
  const auto norm = [&] {
    double squares = 0;
    for (const auto& gradient : step.gradients)
      squares += gradient.to(at::kDouble).square().sum().item<double>();
    return std::sqrt(squares);
  };
  if (!clip.groups.empty()) {
    step.figures.unclipped_norm = norm();
    clip_apart(clip, step.names, step.gradients);
  }
  step.figures.norm = norm();
  if (clip.groups.empty() && clip.max_norm > 0)
    step.figures.clip_coefficient = std::min(1.0, clip.max_norm / (step.figures.norm + 1e-6));
  return step;
}

namespace {

// torch.optim.SGD and AdamW as their papers have them, on whole tensors.
class PlainOptimizer {
 public:
  explicit PlainOptimizer(const OptimizerOptions& options) : options_(options) {}

  // Moves `p` by `gradient`; the most that an error of 1 in the gradient's norm can move it further.
  double update(std::size_t index, const std::string& name, at::Tensor& p, const at::Tensor& gradient) {
    const auto [rate, decay] = std::visit(
        [&](const auto& options) {
          std::pair own(options.learning_rate, p.dim() >= 2 ? options.weight_decay : 0.0);
          for (const ParameterGroup& group : options.groups) {
            if (!fits(group.pattern, name)) continue;
            own.first *= group.rate;
            own.second = group.weight_decay.value_or(own.second);
          }
          return own;
        },
        options_);
    if (const auto* sgd = std::get_if<SgdOptions>(&options_)) {
      const at::Tensor g = gradient + decay * p;
      at::Tensor& b = state(first_, index, p);
      b = sgd->momentum * b + g;
      p -= rate * b;
      return rate / (1 - sgd->momentum);
    }
    const auto& adam = std::get<AdamWOptions>(options_);
    const auto t = static_cast<double>(index == 0 ? ++updates_ : updates_);
    at::Tensor &m = state(first_, index, p), &v = state(second_, index, p);
    m = adam.beta1 * m + (1 - adam.beta1) * gradient;
    v = adam.beta2 * v + (1 - adam.beta2) * gradient * gradient;
    p *= 1 - rate * decay;
    const at::Tensor root = (v / (1 - std::pow(adam.beta2, t))).sqrt() + adam.epsilon;
    p -= rate * (m / (1 - std::pow(adam.beta1, t))) / root;
    return p.numel() ? rate / root.min().item<double>() : 0;
  }

 private:
  static at::Tensor& state(std::vector<at::Tensor>& of, std::size_t index, const at::Tensor& like) {
    if (of.size() <= index) of.resize(index + 1);
    if (!of[index].defined()) of[index] = at::zeros_like(like);
    return of[index];
  }
  OptimizerOptions options_;
  std::vector<at::Tensor> first_, second_;
  std::int64_t updates_ = 0;
};

}  // namespace

OracleStep oracle_part(const VerifyModel& model, const MicroBatches& part, const MicroBatches& whole,
                       const DeclaredLoss& declared, const std::function<void()>& after_micro_batch) {
  if (declared.mean != Mean::kSamples) return oracle_step(model, {part}, declared, {}, after_micro_batch);
  // Under the sample mean a part that holds a tenth of a sample counts a tenth: no number of samples says so,
  // but their sum divided by that of the tenths does.
  const Sums all = sums_of(whole);
  double counted = 0;
  for (const auto& [id, weight] : sums_of(part).sample_weights)
    if (weight > 0) counted += weight / all.sample_weights.at(id);
  MicroBatches weighed = part;
  for (Batch& batch : weighed) {
    at::Tensor factors = valid_weights(batch);
    for (std::size_t f = 0; f < batch.sample_ids.size(); ++f)
      if (const double own = all.sample_weights.at(batch.sample_ids[f]); own > 0)
        factors.slice(0, batch.cu_seqlens[f], batch.cu_seqlens[f + 1]) /= own;
    batch.weights = factors;
  }
  DeclaredLoss fixed = declared;
  fixed.mean = Mean::kFixed;
  fixed.denominator = counted > 0 ? counted : 1;
  return oracle_step(model, {weighed}, fixed, {}, after_micro_batch);
}

OracleUpdates oracle_updates(const VerifyModel& model, const std::vector<MicroBatches>& parts,
                             const DeclaredLoss& declared, const OracleClip& clip,
                             const OptimizerOptions& options, int updates,
                             const std::function<void()>& after_micro_batch) {
  OracleUpdates result;
  std::vector<at::Tensor> start;
  for (const auto& [name, tensor] : model.named) {
    if (!tensor.requires_grad()) continue;
    result.parameters.push_back(tensor.detach());
    start.push_back(tensor.detach().clone());
  }
  result.allowed.resize(start.size());
  PlainOptimizer optimizer(options);
  for (int i = 0; i < updates; ++i) {
    const OracleStep step = oracle_step(model, parts, declared, clip, after_micro_batch);
    const auto scales = error_scales(step.gradients);
    for (std::size_t p = 0; p < start.size(); ++p) {
      const double coefficient = step.figures.clip_coefficient;
      const double reach =
          optimizer.update(p, step.names[p], result.parameters[p], step.gradients[p] * coefficient);
      result.allowed[p] += reach * coefficient * Bounds{}.exact * scales[p];
    }
  }
  for (std::size_t p = 0; p < start.size(); ++p)
    result.moved.push_back((result.parameters[p] - start[p]).norm().item<double>());
  return result;
}

}  // namespace isograd
