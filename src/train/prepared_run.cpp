#include "train/prepared_run.hpp"

#include <ATen/ops/tensor.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/refuse.hpp"
#include "train/config_table.hpp"
#include "train/device.hpp"
#include "train/evaluate.hpp"
#include "train/rank_layout.hpp"
#include "train/rank_zero.hpp"
#include "train/run_folder.hpp"

namespace isograd {
namespace {

// First, so that every rank refuses what one rank alone has.
const RunConfig& checked(const RunConfig& config, World& world) {
  check_same_configuration(config, world.group);
  check(config, world.size);
  return config;
}

}  // namespace

PreparedRun::PreparedRun(const RunConfig& run_config, World& run_world,
                         const std::function<ForwardLossTerms(ForwardLossTerms)>& wrap_forward,
                         const std::function<void()>& accepted)
    : config(checked(run_config, run_world)),
      world(run_world),
      device(device_of(config, world)),
      schedule_(make_schedule(config)) {
  if (accepted) accepted();
  Group& group = world.group;
  task = make_task(config, group);
  optimizer = make_optimizer(config);
  if (auto groups = clip_groups_of(config, "train.clip_groups"); !groups.empty()) {
    auto clipping =
        std::make_unique<ClipsGroups>(std::move(optimizer), std::move(groups), config.train.max_norm, group);
    clips = clipping.get(), optimizer = std::move(clipping);
  }
  normalizer = make_normalizer(config, world.size);
  mesh.emplace(world, grid_of(config, world.size));
  parts.emplace(*task, *mesh, group);
  loader = task->make_loader(mesh->place(kSampleAxes), mesh->size(kSampleAxes));
  validation = task->make_validation_loader(mesh->place(kSampleAxes), mesh->size(kSampleAxes));
  if (config.run.memory) memory.emplace(device);
  std::optional<Resumed> resumed = resume_run(*task, group);
  if (!resumed) {
    state = fresh_state(*task);
    lay_out_model({}, {});
  } else {
    lay_out_model(resumed->directory, resumed->state.bucket_order);
    restore_optimizer(resumed->directory, resumed->state, *layout, *optimizer, placed());
    resumed_from = resumed->directory, state = std::move(resumed->state);
    learning_rates = schedule_change(state, config);
    state.config = to_toml(config);
    loader->seek(state.position);
  }
  if (memory) memory->follow_experts(config, *mesh, model->sharded_experts());
  model->attend_over(*mesh);
  forward = on_device(device, inside(units->root, model->loss()));
  if (wrap_forward) forward = wrap_forward(forward);
  look_ahead = model->look_ahead(forward);
  StepOptions options{
      .max_norm = clips ? 0 : config.train.max_norm,
      .even_micro_batches = config.loss.balance != 0 && config.loss.balance_scope == "micro_batch",
      .look_ahead = look_ahead,
      .counters = memory ? memory->remembering(model->counters()) : model->counters()};
  options.norm_parts = norm_parts_;
  // Experts' rows vary, memory is measured in mid-pass, and dropout is drawn on the CPU.
  options.capture = config.parallel.cuda_graphs && config.model.kind == "decoder" && !options.counters &&
                    !memory && config.model.lora.dropout == 0;
  if (const Pipeline* pipeline = model->pipeline()) options = through(*pipeline, std::move(options));
  step_ = std::make_unique<Step>(forward, *layout, *normalizer, *optimizer, std::move(options));
}

// Loads the weights of `directory`; empty: the initial ones.
void PreparedRun::lay_out_model(const fs::path& directory, const std::vector<std::string>& bucket_order) {
  ModelToLayOut made;
  on_every_rank(world.group, [&] { made = task->make_model_to_lay_out(directory); });
  model = made.model;
  const bool sharded = stage_of(config.parallel.strategy) == 3;
  if (sharded && made.check_values) on_rank_zero(world.group, made.check_values);
  for (const auto& [name, tensor] : model->named()) parameters += tensor.numel();
  check_groups(config, model->named());
  norm_parts_ = norm_parts_of(config, model->named());
  if (model_parallel(config)) placed_.emplace(model->cut(*mesh));
  if (made.fill && !sharded)
    on_every_rank(world.group, [&] { give_values(model->named(), made.fill, placed(), device); });
  model->to(device);
  units = model->make_units();
  units->initialize = made.fill;
  if (world.rank == 0)
    parameter_map = to_text(lay_out(config, model->named(), *units, world.group, 0,
                                    placed_ ? placed_->placements() : Layout::Named{}));
  layout = make_layout(config, model->named(), *units, *mesh, placed(), bucket_order, device);
}

StepReport PreparedRun::step(Requests requests, const std::function<void()>& when_split) {
  optimizer->set_learning_rate(schedule_.at(state.step));
  const MicroBatches own = parts->of_step(loader->next());
  if (when_split) when_split();
  const StepReport report = (*step_)(own, requests);
  if (report.updated) model->after_update(report.counters, *layout);
  rounds = report.step_counts.global_micro_batches;
  if (diverged(report)) return report;
  ++state.step, state.validation_loss.reset();
  state.position = loader->position(), state.updates = optimizer->updates();
  if (!report.finite) ++state.skipped;
  return report;
}

std::optional<Evaluation> PreparedRun::evaluate() {
  if (!validation) return std::nullopt;
  validation->seek({});  // its first step is all that is held out
  Evaluation result = isograd::evaluate(forward, *normalizer, *layout, parts->of(validation->next()));
  if (result.targets == 0) return std::nullopt;
  result.step = state.step;
  if (std::isfinite(result.loss)) state.validation_loss = result.loss;
  return result;
}

fs::path PreparedRun::save() {
  state.bucket_order = layout->bucket_order();
  const WriteModel write = [this](const fs::path& directory, const TensorStream& weights) {
    model->write(directory, weights);
  };
  const SaveOptions options{.root = checkpoint_root(config),
                            .keep = config.checkpoint.keep,
                            .keep_best = config.checkpoint.keep_best,
                            .placed = placed(),
                            .makes_folders = false};  // a run's folder that was deleted is not made anew
  return save_checkpoint(options, state, write, *layout, *optimizer);
}

namespace {

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

CutBatches::CutBatches(const Task& task, const Mesh& mesh, Group world)
    : task_(task), mesh_(mesh), world_(std::move(world)), options_(cut_options(task, mesh)) {
  options_.most_tokens = task.config().batch.max_tokens_per_rank;
}

MicroBatches CutBatches::of(const MicroBatches& whole) {
  MicroBatches parts;
  std::optional<ErrorText> problem;
  try {
    if (mesh_.size(kContextAxes) > 1) {
      parts = cut_micro_batches(whole, options_, mesh_.place(kContextAxes));
    } else {
      for (const Batch& batch : whole)
        if (options_.most_tokens > 0) check_memory(batch, task_.config());
      parts = whole;
    }
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
