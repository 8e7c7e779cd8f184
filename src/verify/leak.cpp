#include "verify/leak.hpp"

#include <torch/csrc/autograd/autograd.h>

#include <set>

#include "verify/compare.hpp"
#include "verify/experiments.hpp"
#include "verify/oracle.hpp"

namespace isograd {
namespace {

struct PackRun {
  at::Tensor logits;
  std::vector<at::Tensor> gradients;  // of the loss, by parameter
};

PackRun run(const VerifyModel& model, const std::vector<at::Tensor>& leaves, const Batch& batch,
            const DeclaredLoss& declared) {
  PackRun outcome;
  const at::Tensor logits = model.logits(batch);
  outcome.logits = logits.detach();
  const at::Tensor nll = plain_token_losses(logits, batch, declared).sum();
  if (nll.requires_grad()) outcome.gradients = dense_gradients(nll, leaves);
  return outcome;
}

// Whether b is what a was: to the bit, or where products round by how many tokens share an expert within E1's
// bound, of the scale s.
bool same(const at::Tensor& a, const at::Tensor& b, bool to_the_bit, double scale) {
  return to_the_bit ? a.equal(b) : (a - b).norm().item<double>() <= Bounds{}.exact * scale;
}

// s of each gradient, which is not that of its own rounding where it is next to nothing.
std::vector<double> scales_of(std::vector<at::Tensor> gradients, const std::vector<at::Tensor>& leaves) {
  for (std::size_t i = 0; i < gradients.size(); ++i)
    if (!gradients[i].defined()) gradients[i] = at::zeros_like(leaves[i]);
  return error_scales(gradients);
}

double largest(const at::Tensor& tensor) {
  return tensor.numel() ? tensor.abs().max().item<double>() : 0;
}

}  // namespace

std::string Leak::text() const {
  return fmt::format(
      "changing document {} in a pack changes document {}: its logits by {:.3g}{}", perturbed, touched,
      logits,
      parameter.empty() ? "" : fmt::format(", the others' gradient of {} by {:.3g}", parameter, gradient));
}

std::optional<Leak> probe_documents(const VerifyModel& model, const Batch& batch,
                                    const DeclaredLoss& declared) {
  const std::set<std::int64_t> documents(batch.sample_ids.begin(), batch.sample_ids.end());
  if (documents.size() < 2) return std::nullopt;
  std::vector<at::Tensor> leaves;
  std::vector<std::string> names;
  for (const auto& [name, tensor] : model.named)
    if (tensor.requires_grad()) {
      leaves.push_back(tensor);
      names.push_back(name);
    }
  const bool to_the_bit = !model.choose_experts;
  const std::int64_t vocabulary = model.logits(batch).size(1);
  // Documents look at what stands before them, or after: the first one is changed, then the last.
  for (const std::int64_t changed : {batch.sample_ids.front(), batch.sample_ids.back()}) {
    Batch before = batch, after;
    before.targets = batch.targets.clone();
    at::Tensor tokens = batch.tokens.clone();
    at::Tensor others = at::ones({batch.num_tokens()}, at::kBool);
    for (std::size_t f = 0; f < batch.sample_ids.size(); ++f) {
      if (batch.sample_ids[f] != changed) continue;
      const auto begin = batch.cu_seqlens[f], end = batch.cu_seqlens[f + 1];
      before.targets.slice(0, begin, end).fill_(kIgnoreIndex);  // its own loss takes no part
      at::Tensor own = tokens.slice(0, begin, end);
      own.copy_(declared.per_token ? own.flip(0) : (own + 1).remainder(vocabulary));
      others.slice(0, begin, end).fill_(false);
    }
    after = before;
    after.tokens = tokens;
    for (std::size_t f = 0; f < batch.sample_ids.size(); ++f)
      if (batch.sample_ids[f] == changed) perturb_inputs(after, static_cast<std::int64_t>(f));
    const PackRun first = run(model, leaves, before, declared), second = run(model, leaves, after, declared);
    Leak leak{.perturbed = changed, .touched = 0, .logits = 0, .parameter = {}, .gradient = 0};
    bool leaks = false;
    for (std::size_t f = 0; f < batch.sample_ids.size(); ++f) {
      if (batch.sample_ids[f] == changed) continue;
      const auto part = [&](const at::Tensor& logits) {
        return logits.slice(0, batch.cu_seqlens[f], batch.cu_seqlens[f + 1]);
      };
      const double norm = part(first.logits).norm().item<double>();
      if (same(part(first.logits), part(second.logits), to_the_bit, norm)) continue;
      const double change = largest(part(first.logits) - part(second.logits));
      if (!leaks || change > leak.logits) {
        leak.touched = batch.sample_ids[f];
        leak.logits = change;
      }
      leaks = true;
    }
    const auto scales = scales_of(first.gradients, leaves);
    for (std::size_t i = 0; i < first.gradients.size(); ++i) {
      const at::Tensor &a = first.gradients[i], &b = second.gradients[i];
      if (!a.defined() || !b.defined() || same(a, b, to_the_bit, scales[i])) continue;
      const double change = largest(a - b);
      if (leak.parameter.empty() || change > leak.gradient) {
        leak.parameter = names[i];
        leak.gradient = change;
      }
      leaks = true;
    }
    if (leaks) return leak;
  }
  return std::nullopt;
}

}  // namespace isograd
