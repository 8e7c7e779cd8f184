#include "train/router_losses.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>

#include "model/experts.hpp"

namespace isograd {

RouterLosses::RouterLosses(const RunConfig& config, const DecoderConfig& shape)
    : shape_(shape.experts),
      weight_(config.loss.balance),
      z_weight_(config.loss.router_z),
      scope_(config.loss.balance_scope == "step" ? Scope::kStep : Scope::kMicroBatch) {
  for (std::int64_t layer = 0; layer < shape.layers; ++layer)
    if (shape.has_experts(layer)) layers_.push_back(layer);
  balance_options_ = {.name = kBalanceTerm,
                      .experts = shape.experts.count,
                      .layers = static_cast<std::int64_t>(layers_.size()),
                      .pooled = config.loss.balance_over == "model",
                      .weight = weight_,
                      .scope = scope_};
  if (weight_ != 0) balance_.emplace(balance_options_, Group::solo());
}

void RouterLosses::sum_over(const Group& data) {
  if (balance_) balance_.emplace(balance_options_, data);
}

void RouterLosses::add_terms(const std::vector<at::Tensor>& router_logits,
                             const std::vector<at::Tensor>& chosen, LossTerms& terms) {
  for (std::size_t i = 0; i < router_logits.size() && not_finite_ < 0; ++i)
    if (!router_logits[i].detach().isfinite().all().item<bool>()) not_finite_ = layers_.at(i);
  if (balance_) {
    if (collecting_) return balance_->collect(chosen);
    std::vector<at::Tensor> probabilities;
    for (const at::Tensor& logits : router_logits)
      probabilities.push_back(router_probabilities(logits, shape_));
    terms.push_back(balance_->term(probabilities, chosen));
  }
  // Once a micro-batch: what a checkpointed block computes again in backward does not come here.
  for (std::size_t i = 0; i < chosen.size() && choices_.defined() && !collecting_; ++i)
    choices_[static_cast<std::int64_t>(i)] +=
        at::bincount(chosen[i].flatten().cpu(), {}, balance_options_.experts);
  if (z_weight_ == 0 || collecting_) return;
  std::vector<at::Tensor> sums;
  for (const at::Tensor& logits : router_logits)
    sums.push_back(logits.to(at::kDouble).logsumexp(1).square().sum());
  terms.push_back({.name = kRouterZTerm,
                   .sum = at::stack(sums).mean(),  // over layers; the step divides by its tokens
                   .mean = Mean::kTokens,
                   .weight = z_weight_});
}

void RouterLosses::look_ahead(const MicroBatches& micro_batches, const Group& data,
                              const ForwardLossTerms& forward) {
  if (!looks_ahead()) return;
  sum_over(data);
  const at::NoGradGuard no_grad;
  collecting_ = true;
  try {
    for (const Batch& batch : micro_batches) forward(batch);
  } catch (...) {
    collecting_ = false;
    throw;
  }
  collecting_ = false;
  balance_->finish_collecting();
}

void RouterLosses::count_choices() {
  choices_ = at::zeros({balance_options_.layers, balance_options_.experts}, at::kLong);
}

std::vector<double> RouterLosses::take_choices() {
  const at::Tensor counts = choices_.to(at::kDouble).flatten();  // exact below 2^53
  choices_.zero_();
  return {counts.const_data_ptr<double>(), counts.const_data_ptr<double>() + counts.numel()};
}

std::vector<ExpertLoad> RouterLosses::loads_of(const std::vector<double>& counts) const {
  std::vector<ExpertLoad> loads;
  if (std::ranges::all_of(counts, [](double count) { return count == 0; })) return loads;
  const auto experts = static_cast<std::size_t>(balance_options_.experts);
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    loads.push_back({.layer = layers_[i]});
    for (std::size_t e = 0; e < experts; ++e)
      loads.back().choices.push_back(static_cast<std::int64_t>(counts.at(i * experts + e)));
  }
  return loads;
}

std::string RouterLosses::take_not_finite() {
  if (not_finite_ < 0) return {};
  return fmt::format("the router logits of layer {}", std::exchange(not_finite_, -1));
}

}  // namespace isograd
