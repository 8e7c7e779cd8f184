#include "train/router_losses.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>

#include "model/experts.hpp"

namespace isograd {
namespace {

constexpr const char *kBalanceTerm = "balance", *kRouterZTerm = "router_z";

}  // namespace

RouterLosses::RouterLosses(const RunConfig& config, const DecoderConfig& shape)
    : shape_(shape.experts), z_weight_(config.loss.router_z) {
  for (std::int64_t layer = 0; layer < shape.layers; ++layer)
    if (shape.has_experts(layer)) layers_.push_back(layer);
  options_ = {.name = kBalanceTerm,
              .experts = shape.experts.count,
              .layers = static_cast<std::int64_t>(layers_.size()),
              .pooled = config.loss.balance_over == "model",
              .weight = config.loss.balance,
              .scope = config.loss.balance_scope == "step" ? Scope::kStep : Scope::kMicroBatch};
  if (options_.weight != 0) balance_.emplace(options_, Group::solo());
}

void RouterLosses::sum_over(const Group& data) {
  if (balance_) balance_.emplace(options_, data);
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
  if (collecting_) return;
  // Choices are counted once per micro-batch: the recomputation of a checkpointed block does not call this.
  for (std::size_t i = 0; i < rows.size() && choices_.defined(); ++i)
    choices_[static_cast<std::int64_t>(rows[i])] +=
        at::bincount(outputs.chosen[i].flatten().cpu(), {}, shape_.count);
  if (z_weight_ == 0) return;
  // On the logits' device: a part on the CPU would have a backward thread of its own, and the order in which
  // gradients are added, and so their bits, would change from run to run.
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

void RouterLosses::count_choices() { choices_ = at::zeros({options_.layers, options_.experts}, at::kLong); }

std::vector<double> RouterLosses::take_choices() {
  const at::Tensor counts = choices_.to(at::kDouble).flatten();  // exact below 2^53
  choices_.zero_();
  return {counts.const_data_ptr<double>(), counts.const_data_ptr<double>() + counts.numel()};
}

std::vector<ExpertLoad> RouterLosses::loads_of(const std::vector<double>& counts) const {
  std::vector<ExpertLoad> loads;
  if (std::ranges::all_of(counts, [](double count) { return count == 0; })) return loads;
  auto count = counts.begin();
  for (const std::int64_t layer : layers_) {
    loads.push_back({.layer = layer, .choices = {count, count + options_.experts}});
    count += options_.experts;
  }
  return loads;
}

std::string RouterLosses::take_not_finite() {
  if (not_finite_ < 0) return {};
  return fmt::format("the router logits of layer {}", std::exchange(not_finite_, -1));
}

// ---- plain code ----

std::vector<PlainTerm> plain_router_terms(const RunConfig& config, DecoderLM& model) {
  std::vector<PlainTerm> terms;
  const ExpertsShape shape = model.config().experts;
  if (shape.count == 0) return terms;
  struct Routing {        // of the whole step
    at::Tensor places{};  // [layers, E] fp64
    double tokens = 0;    // of one layer
  };
  const auto known = std::make_shared<Routing>();
  const auto read = [known, &model, experts = shape.count](const MicroBatches& whole) {
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> places;
    known->tokens = 0;
    for (const Batch& batch : whole) {
      const auto chosen = model.outputs(batch).chosen;
      places.resize(chosen.size(), at::zeros({experts}, at::kDouble));
      for (std::size_t layer = 0; layer < chosen.size(); ++layer)
        places[layer] = places[layer] + at::one_hot(chosen[layer].cpu(), experts).sum(at::IntArrayRef{0, 1});
      known->tokens += static_cast<double>(batch.num_tokens());
    }
    known->places = places.empty() ? at::zeros({0, experts}, at::kDouble) : at::stack(places);
  };
  const auto balance = [known, &model, shape,
                        pooled = config.loss.balance_over == "model"](const Batch& batch) {
    const auto logits = model.outputs(batch).router_logits;
    at::Tensor loss = at::zeros({}, at::kDouble);
    for (std::size_t layer = 0; layer < logits.size(); ++layer) {
      const at::Tensor fraction =  // of routed places
          (pooled ? known->places.mean(0) : known->places[static_cast<std::int64_t>(layer)]) /
          (known->tokens * static_cast<double>(shape.per_token));
      const at::Tensor own = logits[layer].to(at::kCPU, at::kDouble);
      const at::Tensor score = shape.sigmoid ? at::sigmoid(own) : at::softmax(own, 1);
      const at::Tensor mass = (score / score.sum(1, true)).sum(0);
      loss = loss + static_cast<double>(shape.count) * fraction.dot(mass) / known->tokens /
                        static_cast<double>(logits.size());
    }
    return loss;
  };
  const auto router_z = [&model](const Batch& batch) {
    const auto logits = model.outputs(batch).router_logits;
    at::Tensor loss = at::zeros({}, at::kDouble);
    for (const at::Tensor& own : logits)
      loss = loss + own.to(at::kCPU, at::kDouble).exp().sum(1).log().pow(2).sum() /
                        static_cast<double>(logits.size());
    return loss;
  };
  if (config.loss.balance != 0) terms.push_back({"balance", config.loss.balance, Mean::kNone, read, balance});
  if (config.loss.router_z != 0)
    terms.push_back({"router_z", config.loss.router_z, Mean::kTokens, {}, router_z});
  return terms;
}

}  // namespace isograd
