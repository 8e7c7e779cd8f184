#include "train/cut_batches.hpp"

#include <ATen/ops/tensor.h>
#include <fmt/format.h>

#include <algorithm>

#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "train/rank_zero.hpp"
#include "train/task_kind.hpp"

namespace isograd {
namespace {

CutOptions cut_options(const Task& task, const Mesh& mesh) {
  CutOptions options;
  if (mesh.size(kContextAxes) > 1) options = task.cut_options();
  options.ring = static_cast<int>(task.config().parallel.cp_ring);
  options.ulysses = static_cast<int>(task.config().parallel.cp_ulysses);
  return options;
}

// Memory check of a micro-batch that is not split.
void check_memory(const Batch& batch, const RunConfig& config) {
  const std::int64_t most = config.batch.max_tokens_per_rank, tokens = batch.num_tokens();
  if (tokens <= most) return;
  const TaskKind& kind = kind_of(config);
  refuse("batch.max_tokens_per_rank", fmt::format("a micro-batch of {} {}", tokens, kind.tokens),
         fmt::format("at most {} on a rank", most),
         fmt::format("Cut it over {} context ranks or more (parallel.cp_ring, parallel.cp_ulysses), or lower "
                     "{}",
                     (tokens + most - 1) / most, kind.smaller));
}

}  // namespace

MicroBatches own_parts(const Task& task, const Mesh& mesh, MicroBatches micro_batches) {
  if (mesh.size(kContextAxes) == 1) return micro_batches;
  return cut_micro_batches(micro_batches, cut_options(task, mesh), mesh.place(kContextAxes));
}

CutBatches::CutBatches(const Task& task, const Mesh& mesh, Group world)
    : task_(task), mesh_(mesh), world_(std::move(world)), options_(cut_options(task, mesh)) {
  options_.most_tokens = task.config().batch.max_tokens_per_rank;
}

MicroBatches CutBatches::of(const MicroBatches& whole) {
  MicroBatches parts = whole;
  std::optional<ErrorText> problem;
  try {
    if (mesh_.size(kContextAxes) > 1)
      parts = cut_micro_batches(whole, options_, mesh_.place(kContextAxes));
    else if (options_.most_tokens > 0)
      for (const Batch& batch : whole) check_memory(batch, task_.config());
  } catch (const ConfigError& error) {
    if (options_.most_tokens == 0) throw;
    problem = error.text();
    problem->where = "batch.max_tokens_per_rank";
  }
  if (options_.most_tokens > 0) throw_agreed(world_, problem);
  return parts;
}

MicroBatches CutBatches::of_step(const MicroBatches& whole) {
  MicroBatches parts = of(whole);
  first_step_.clear();
  double least_level = 0;
  for (const Batch& part : parts) {
    if (!part.cut || part.cut->cu_seqlens.back() == 0) continue;
    const CutCost cost = cost_of(*part.cut, options_);
    sum_ += cost.imbalance;
    ++cuts_;
    worst_ = std::max(worst_, cost.imbalance);
    if (!first_ || cost.imbalance <= least_level) continue;
    least_level = cost.imbalance;
    first_step_ = describe(cost);
  }
  first_ = false;
  return parts;
}

std::optional<Outcome::Balance> CutBatches::balance() {
  at::Tensor sums = at::tensor({sum_, cuts_}, at::kDouble), worst = at::tensor({worst_}, at::kDouble);
  world_.all_reduce(sums);
  world_.all_reduce(worst, ReduceOp::kMax);
  const double cuts = sums[1].item<double>();
  if (cuts == 0) return std::nullopt;
  return Outcome::Balance{.mean = sums[0].item<double>() / cuts, .worst = worst.item<double>()};
}

}  // namespace isograd
