#include "isograd/balance_loss.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/graph_task.h>

#include "isograd/error.hpp"

namespace isograd {
namespace {

[[noreturn]] void refuse_balance_loss(const std::string& name, std::string found, std::string expected,
                                      std::string action) {
  throw ConfigError({.where = fmt::format("balance loss '{}'", name),
                     .found = std::move(found),
                     .expected = std::move(expected),
                     .action = std::move(action)});
}

}  // namespace

BalanceLoss::BalanceLoss(BalanceLossOptions options, Group data)
    : options_(std::move(options)), data_(std::move(data)) {
  if (options_.experts < 1)
    refuse_balance_loss(options_.name, fmt::format("{} experts", options_.experts), "1 or more",
                        "Set experts");
}

at::Tensor BalanceLoss::counts_of(const at::Tensor& chosen) const {
  at::Tensor counts = at::zeros({options_.experts + 1}, at::kLong);
  if (!chosen.defined() || chosen.numel() == 0) return counts;
  if (chosen.dim() != 2 || chosen.scalar_type() != at::kLong || chosen.min().item<std::int64_t>() < 0 ||
      chosen.max().item<std::int64_t>() >= options_.experts)
    refuse_balance_loss(
        options_.name,
        fmt::format("chosen experts {} of {}", c10::str(chosen.sizes()), c10::toString(chosen.scalar_type())),
        fmt::format("[T, k] int64 from 0 to {}", options_.experts - 1),
        "Pass the router's choice of each token");
  counts.narrow(0, 0, options_.experts).copy_(at::bincount(chosen.flatten(), {}, options_.experts));
  counts[options_.experts] = chosen.size(0);
  return counts;
}

void BalanceLoss::collect(const at::Tensor& chosen) {
  if (options_.scope != Scope::kStep)
    refuse_balance_loss(options_.name, "collect() with scope micro-batch", "scope step", "Call term() alone");
  if (collected_ || !counts_.defined()) counts_ = at::zeros({options_.experts + 1}, at::kLong);
  collected_ = false;
  counts_ += counts_of(chosen);
}

void BalanceLoss::finish_collecting() {
  // A rank without micro-batches has collected nothing; a step's counts are not the next step's.
  if (collected_ || !counts_.defined()) counts_ = at::zeros({options_.experts + 1}, at::kLong);
  tokens_left_ = counts_[options_.experts].item<std::int64_t>();
  if (data_.size() > 1) data_.all_reduce(counts_);
  collected_ = true;
}

LossTerm BalanceLoss::term(const at::Tensor& probabilities, const at::Tensor& chosen) {
  if (!probabilities.defined() || probabilities.dim() != 2 || probabilities.size(1) != options_.experts)
    refuse_balance_loss(options_.name,
                        probabilities.defined()
                            ? fmt::format("router probabilities {}", c10::str(probabilities.sizes()))
                            : "none",
                        fmt::format("[T, {}]", options_.experts), "Pass the router's softmax");
  const bool step = options_.scope == Scope::kStep;
  if (step && !collected_)
    refuse_balance_loss(
        options_.name, "term() of scope step before the routing of the step is known",
        "a pass without gradient with collect(), then finish_collecting()",
        "Collect first; or say Scope::kMicroBatch, a loss that depends on ranks and micro-batches");
  // A checkpointed forward is made again in backward: the same tokens.
  if (step && torch::autograd::get_current_graph_task_id() < 0) {
    tokens_left_ -= probabilities.size(0);
    if (tokens_left_ < 0)
      refuse_balance_loss(options_.name, "terms over more tokens than were collected",
                          "the routing of this step, collected before it",
                          "Call collect() for each micro-batch and finish_collecting() before every step");
  }
  at::Tensor counts = step ? counts_ : counts_of(chosen);
  if (!step && data_.size() > 1) data_.all_reduce(counts);
  const auto tokens = static_cast<double>(counts[options_.experts].item<std::int64_t>());
  const at::Tensor places = counts.narrow(0, 0, options_.experts).to(at::kDouble);
  const double all_places = places.sum().item<double>();
  LossTerm term{
      .name = options_.name, .mean = step ? Mean::kNone : Mean::kMicroBatches, .weight = options_.weight};
  if (tokens == 0 || probabilities.size(0) == 0) {
    term.sum = at::zeros({}, at::kDouble);
    return term;
  }
  const at::Tensor factor = places * (static_cast<double>(options_.experts) / (all_places * tokens));  // [E]
  term.sum = (probabilities.to(at::kDouble).sum(0) * factor.to(probabilities.device())).sum();
  return term;
}

}  // namespace isograd
