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

void RouterLosses::sum_over_stages(const Group& data_and_stages) {
  stages_ = data_and_stages;
  sum_over(*stages_);
}

void RouterLosses::add_terms(const DecoderOutputs& outputs, LossTerms& terms) {
  std::vector<std::size_t> rows;  // of layers_
  for (const std::int64_t layer : outputs.routed)
    rows.push_back(static_cast<std::size_t>(std::ranges::lower_bound(layers_, layer) - layers_.begin()));
  for (std::size_t i = 0; i < rows.size() && not_finite_ < 0; ++i)
    if (!outputs.router_logits[i].detach().isfinite().all().item<bool>()) not_finite_ = outputs.routed[i];
  if (balance_) {
    // A layer of another pipeline stage has no tokens here.
    std::vector<at::Tensor> probabilities(layers_.size(), at::zeros({0, shape_.count}, at::kDouble)),
        chosen(layers_.size(), at::zeros({0, shape_.per_token}, at::kLong));
    for (std::size_t i = 0; i < rows.size(); ++i) {
      chosen[rows[i]] = outputs.chosen[i];
      if (!collecting_) probabilities[rows[i]] = router_probabilities(outputs.router_logits[i], shape_);
    }
    if (collecting_) return balance_->collect(chosen);
    terms.push_back(balance_->term(probabilities, chosen));
  }
  // Choices are counted once per micro-batch: the recomputation of a checkpointed block does not call this.
  for (std::size_t i = 0; i < rows.size() && choices_.defined() && !collecting_; ++i)
    choices_[static_cast<std::int64_t>(rows[i])] +=
        at::bincount(outputs.chosen[i].flatten().cpu(), {}, shape_.count);
  if (z_weight_ == 0 || collecting_) return;
  // On the device of the logits. Part of a graph on the CPU would have a backward thread of its own there,
  // and which of the logits' gradients came first, and so the bits of their sum, would change from run to
  // run.
  at::Tensor sum = at::zeros({}, at::kDouble);
  for (const at::Tensor& logits : outputs.router_logits)
    sum = sum + logits.to(at::kDouble).logsumexp(1).square().sum();
  terms.push_back({.name = kRouterZTerm,
                   .sum = sum / static_cast<double>(layers_.size()),  // the step divides by its tokens
                   .mean = Mean::kTokens,
                   .weight = z_weight_});
}

void RouterLosses::look_ahead(const MicroBatches& micro_batches, const Group& data,
                              const ForwardLossTerms& forward) {
  if (!looks_ahead()) return;
  sum_over(stages_ ? *stages_ : data);
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
