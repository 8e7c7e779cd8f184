#include "isograd/loss.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/graph_task.h>

#include "base/refuse.hpp"

namespace isograd {
namespace {

[[noreturn]] void refuse_balance_loss(const std::string& name, std::string found, std::string expected,
                                      std::string action) {
  refuse(fmt::format("balance loss '{}'", name), std::move(found), std::move(expected), std::move(action));
}

}  // namespace

BalanceLoss::BalanceLoss(BalanceLossOptions options, Group data)
    : options_(std::move(options)), data_(std::move(data)) {
  if (options_.experts < 1)
    refuse_balance_loss(options_.name, fmt::format("{} experts", options_.experts), "1 or more",
                        "Set experts");
  if (options_.layers < 1)
    refuse_balance_loss(options_.name, fmt::format("{} layers", options_.layers), "1 or more", "Set layers");
}

void BalanceLoss::check_layers(std::size_t found) const {
  if (static_cast<std::int64_t>(found) != options_.layers)
    refuse_balance_loss(options_.name, fmt::format("the routing of {} layers", found),
                        fmt::format("of {}", options_.layers), "Pass what each router says, layer by layer");
}

at::Tensor BalanceLoss::counts_of(const std::vector<at::Tensor>& chosen) const {
  check_layers(chosen.size());
  at::Tensor counts = at::zeros({rows(), options_.experts + 1}, at::kLong);
  for (std::size_t layer = 0; layer < chosen.size(); ++layer) {
    if (!chosen[layer].defined() || chosen[layer].numel() == 0) continue;
    const at::Tensor own = chosen[layer].cpu();
    if (own.dim() != 2 || own.scalar_type() != at::kLong || own.min().item<std::int64_t>() < 0 ||
        own.max().item<std::int64_t>() >= options_.experts)
      refuse_balance_loss(
          options_.name,
          fmt::format("chosen experts {} of {}", c10::str(own.sizes()), c10::toString(own.scalar_type())),
          fmt::format("[T, k] int64 from 0 to {}", options_.experts - 1),
          "Pass the router's choice of each token");
    at::Tensor row = counts[options_.pooled ? 0 : static_cast<std::int64_t>(layer)];
    row.narrow(0, 0, options_.experts) += at::bincount(own.flatten(), {}, options_.experts);
    row.narrow(0, options_.experts, 1) += own.size(0);
  }
  return counts;
}

void BalanceLoss::collect(const std::vector<at::Tensor>& chosen) {
  if (options_.scope != Scope::kStep)
    refuse_balance_loss(options_.name, "collect() with scope micro-batch", "scope step", "Call term() alone");
  if (collected_ || !counts_.defined()) counts_ = at::zeros({rows(), options_.experts + 1}, at::kLong);
  collected_ = false;
  counts_ += counts_of(chosen);
}

void BalanceLoss::finish_collecting() {
  // A rank without micro-batches has collected nothing; a step's counts are not the next step's.
  if (collected_ || !counts_.defined()) counts_ = at::zeros({rows(), options_.experts + 1}, at::kLong);
  tokens_left_ = counts_.select(1, options_.experts).sum().item<std::int64_t>();
  if (data_.size() > 1) data_.all_reduce(counts_);
  collected_ = true;
}

LossTerm BalanceLoss::term(const std::vector<at::Tensor>& probabilities,
                           const std::vector<at::Tensor>& chosen) {
  check_layers(probabilities.size());
  std::int64_t tokens = 0;  // of all layers
  for (const at::Tensor& own : probabilities) {
    if (!own.defined() || own.dim() != 2 || own.size(1) != options_.experts)
      refuse_balance_loss(
          options_.name,
          own.defined() ? fmt::format("router probabilities {}", c10::str(own.sizes())) : "none",
          fmt::format("[T, {}]", options_.experts), "Pass the router's softmax");
    tokens += own.size(0);
  }
  const bool step = options_.scope == Scope::kStep;
  if (step && !collected_)
    refuse_balance_loss(
        options_.name, "term() of scope step before the routing of the step is known",
        "a pass without gradient with collect(), then finish_collecting()",
        "Collect first; or say Scope::kMicroBatch, a loss that depends on ranks and micro-batches");
  // A checkpointed forward is made again in backward: the same tokens.
  if (step && torch::autograd::get_current_graph_task_id() < 0) {
    tokens_left_ -= tokens;
    if (tokens_left_ < 0)
      refuse_balance_loss(options_.name, "terms over more tokens than were collected",
                          "the routing of this step, collected before it",
                          "Call collect() for each micro-batch and finish_collecting() before every step");
  }
  at::Tensor counts = step ? counts_ : counts_of(chosen);
  if (!step && data_.size() > 1) data_.all_reduce(counts);
  LossTerm term{.name = options_.name,
                .mean = step ? Mean::kNone : Mean::kMicroBatches,
                .weight = options_.weight,
                .of_whole_step = step};
  term.sum = at::zeros({}, at::kDouble);
  for (std::size_t layer = 0; layer < probabilities.size(); ++layer) {
    const at::Tensor& own = probabilities[layer];
    const at::Tensor row = counts[options_.pooled ? 0 : static_cast<std::int64_t>(layer)];
    const at::Tensor places = row.narrow(0, 0, options_.experts).to(at::kDouble);
    const auto all_tokens = static_cast<double>(row[options_.experts].item<std::int64_t>());
    if (all_tokens == 0 || own.size(0) == 0) continue;
    // [E]; what the layers' own losses are worth in their mean, too
    const at::Tensor factor =
        places * (static_cast<double>(options_.experts) /
                  (places.sum().item<double>() * all_tokens * static_cast<double>(rows())));
    term.sum = term.sum + (own.to(at::kDouble).sum(0) * factor.to(own.device())).sum();
  }
  return term;
}

}  // namespace isograd
