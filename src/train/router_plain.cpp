#include <ATen/ATen.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "train/router_losses.hpp"

namespace isograd {
namespace {

// Statistics of the whole step.
struct Averages {
  at::Tensor places;  // [layers, E] fp64
  double tokens = 0;  // of one layer
};

}  // namespace

std::vector<PlainTerm> plain_router_terms(const RunConfig& config, const DecoderConfig& shape,
                                          std::function<DecoderLM&(TaskModel&)> decoder) {
  std::vector<PlainTerm> terms;
  if (shape.experts.count == 0) return terms;
  const std::int64_t experts = shape.experts.count, each = shape.experts.per_token;
  const bool sigmoid = shape.experts.sigmoid;
  if (config.loss.balance != 0) {
    const auto known = std::make_shared<Averages>();
    const bool pooled = config.loss.balance_over == "model";
    terms.push_back(
        {.name = "balance",
         .weight = config.loss.balance,
         .mean = Mean::kNone,
         .prepare =
             [=](TaskModel& model, const MicroBatches& whole) {
               const at::NoGradGuard no_grad;
               DecoderLM& own = decoder(model);
               std::vector<at::Tensor> places;
               known->tokens = 0;
               for (const Batch& batch : whole) {
                 const auto chosen = own.outputs(batch).chosen;
                 places.resize(chosen.size(), at::zeros({experts}, at::kDouble));
                 for (std::size_t layer = 0; layer < chosen.size(); ++layer)
                   places[layer] =
                       places[layer] + at::one_hot(chosen[layer].cpu(), experts).sum(at::IntArrayRef{0, 1});
                 known->tokens += static_cast<double>(batch.num_tokens());
               }
               known->places = places.empty() ? at::zeros({0, experts}, at::kDouble) : at::stack(places);
             },
         .sum =
             [=](TaskModel& model, const Batch& batch) {
               const auto logits = decoder(model).outputs(batch).router_logits;
               const auto layers = static_cast<double>(logits.size());
               at::Tensor loss = at::zeros({}, at::kDouble);
               for (std::size_t layer = 0; layer < logits.size(); ++layer) {
                 const auto row = static_cast<std::int64_t>(layer);
                 const at::Tensor fraction =  // of routed places
                     (pooled ? known->places.mean(0) : known->places[row]) /
                     (known->tokens * static_cast<double>(each));
                 const at::Tensor own = logits[layer].to(at::kCPU, at::kDouble);
                 const at::Tensor score = sigmoid ? at::sigmoid(own) : at::softmax(own, 1);
                 const at::Tensor mass = (score / score.sum(1, true)).sum(0);
                 loss = loss + static_cast<double>(experts) * fraction.dot(mass) / known->tokens / layers;
               }
               return loss;
             }});
  }
  if (config.loss.router_z != 0)
    terms.push_back({.name = "router_z",
                     .weight = config.loss.router_z,
                     .mean = Mean::kTokens,
                     .sum = [=](TaskModel& model, const Batch& batch) {
                       at::Tensor loss = at::zeros({}, at::kDouble);
                       const auto logits = decoder(model).outputs(batch).router_logits;
                       for (const at::Tensor& own : logits)
                         loss = loss + own.to(at::kCPU, at::kDouble).exp().sum(1).log().pow(2).sum() /
                                           static_cast<double>(logits.size());
                       return loss;
                     }});
  return terms;
}

}  // namespace isograd
