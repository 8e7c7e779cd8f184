// Makes or plans a configuration's layout: the named strategy with the configured options.
#include <ATen/ops/zeros.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <set>

#include "base/memory.hpp"
#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "parallel/data/rank_roles.hpp"
#include "train/build.hpp"
#include "train/device.hpp"
#include "train/memory.hpp"
#include "train/task_kind.hpp"

namespace isograd {
namespace {

// A strategy by its name. Only chosen() interprets names.
struct Chosen {
  bool naive = false;
  DataParallelOptions options{};  // for all stages except 3
};

// ConfigError: no such strategy, stage 3 of a model without units.
Chosen chosen(const std::string& strategy, const ModelUnits* units, DataParallelOptions options) {
  const auto names = strategy_names();
  if (std::find(names.begin(), names.end(), strategy) == names.end())
    refuse("parallel.strategy", strategy, fmt::format("{}", fmt::join(names, ", ")), "Choose one of them");
  options.stage = stage_of(strategy);
  if (options.stage == 3 && !units)
    refuse("zero3", "a model without units", "VerifyModel::units, as verify_model() gives it",
           "Make the model with verify_model(), or fill in its units");
  if (strategy == "overlapped") options.bucket_bytes = 1, options.first_bucket_bytes = 0;
  return {.naive = strategy == "naive", .options = std::move(options)};
}

TrainableParameters trainable(const NamedTensors& parameters, const Layout::Named& placements,
                              const Grid& grid, int rank) {
  TrainableParameters result = trainable_parameters(held_parameters(parameters, placements, grid, rank));
  result.placements = placements;
  return result;
}

// An order saved by a run with other pipeline stages does not apply to these parameters.
std::vector<std::string> order_of(const std::vector<std::string>& saved, const TrainableParameters& own) {
  std::vector<std::string> order;
  for (const std::string& name : saved)
    if (std::any_of(own.begin(), own.end(), [&](const auto& one) { return one.name == name; }))
      order.push_back(name);
  if (order.size() != own.size()) order.clear();
  return order;
}

FullyShardOptions with(FullyShardOptions options, const Layout::Named& placements) {
  options.placements = placements;
  return options;
}

bool shares_parameters(const RunConfig& config, const RanksOfRun& ranks) {
  const std::string &asked = config.parallel.share_parameters, &strategy = config.parallel.strategy;
  if (asked != "auto") return asked == "on";
  return strategy != "naive" && strategy != "overlapped" && ranks.host_memory && device_kind(config) == "cpu";
}

DataParallelOptions whole_options(const RunConfig& config, bool share) {
  const auto& parallel = config.parallel;
  return {.sharded = sharded_axes(config),
          .share_parameters = share,
          .fp32_gradients = config.train.fp32_gradients,
          .reduce_once = parallel.reduce_once,
          .offload = parallel.offload,
          .bucket_bytes = parallel.bucket_bytes,
          .first_bucket_bytes = parallel.first_bucket_bytes,
          .overlap = parallel.overlap};
}

FullyShardOptions sharded_options(const RunConfig& config, bool share) {
  const auto& parallel = config.parallel;
  return {.reshard_after_forward = parallel.reshard_after_forward,
          .checkpoint = parallel.checkpoint_activations,
          .reduce_once = parallel.reduce_once,
          .fp32_gradients = config.train.fp32_gradients,
          .sharded = sharded_axes(config),
          .share_parameters = share,
          .offload = parallel.offload,
          .gather_limit_bytes = parallel.gather_limit_bytes,
          .prefetch = parallel.prefetch};
}

// One parameter at a time is whole, so that its values are the same under every layout.
FillValues local_part_of(FillValues fill, const Layout& placed) {
  return [fill = std::move(fill), placed](const std::string& name, at::Tensor& values) {
    at::Tensor whole = at::zeros(placed.parameter(name).placement.whole_shape, values.options());
    fill(name, whole);
    values.copy_(placed.local(name, whole));
  };
}

}  // namespace

NamedTensors held_parameters(const NamedTensors& parameters, const Layout::Named& placements,
                             const Grid& grid, int rank) {
  std::set<std::string> elsewhere;
  for (const auto& [name, placement] : placements)
    if (!holds(placement, grid, rank)) elsewhere.insert(name);
  NamedTensors held;
  for (const auto& parameter : parameters)
    if (!elsewhere.contains(parameter.first)) held.push_back(parameter);
  return held;
}

std::unique_ptr<DataParallel> make_strategy(const std::string& strategy, const NamedTensors& parameters,
                                            const ModelUnits* units, const Mesh& mesh,
                                            DataParallelOptions options, const FullyShardOptions& sharded,
                                            const Layout::Named& placements) {
  const Chosen by = chosen(strategy, units, std::move(options));
  if (by.options.stage == 3)
    return fully_shard(units->root, parameters, units->blocks, mesh, with(sharded, placements));
  TrainableParameters own = trainable(parameters, placements, mesh.grid(), mesh.rank());
  DataParallelOptions whole = by.options;
  whole.order = order_of(whole.order, own);
  return (by.naive ? naive : bucketed)(std::move(own), mesh, std::move(whole));
}

std::vector<PlannedBucket> plan_strategy(const std::string& strategy, const NamedTensors& parameters,
                                         const ModelUnits* units, const Grid& grid, int rank,
                                         DataParallelOptions options, const FullyShardOptions& sharded,
                                         const Layout::Named& placements) {
  const Chosen by = chosen(strategy, units, std::move(options));
  if (by.options.stage == 3)
    return plan_fully_sharded(units->root, parameters, units->blocks, grid, rank, with(sharded, placements));
  return (by.naive ? plan_naive : plan_bucketed)(trainable(parameters, placements, grid, rank), grid, rank,
                                                 by.options);
}

std::unique_ptr<DataParallel> make_layout(const RunConfig& config, const NamedTensors& parameters,
                                          const ModelUnits& units, const Mesh& mesh, const Layout* placed,
                                          const std::vector<std::string>& bucket_order, at::Device device) {
  const bool share = shares_parameters(config, mesh.all());
  DataParallelOptions options = whole_options(config, share);
  options.order = bucket_order;
  FullyShardOptions sharded = sharded_options(config, share);
  sharded.blocks_of_pass = units.blocks_of_pass;
  sharded.initialize = units.initialize;
  if (placed && units.initialize) sharded.initialize = local_part_of(units.initialize, *placed);
  sharded.device = device;
  return make_strategy(config.parallel.strategy, parameters, &units, mesh, std::move(options), sharded,
                       placed ? placed->placements() : Layout::Named{});
}

void give_values(const NamedTensors& parameters, const FillValues& fill, const Layout* placed,
                 at::Device device) {
  const FillValues own = placed ? local_part_of(fill, *placed) : fill;
  const at::NoGradGuard no_grad;
  for (const auto& [name, parameter] : parameters) {
    at::Tensor values = at::zeros(parameter.sizes(), parameter.options().device(at::kCPU));
    const bool elsewhere = placed && !placed->parameter(name).held;
    if (!elsewhere) own(name, values);  // the same bits on any device
    values = values.to(device);
    parameter.unsafeGetTensorImpl()->shallow_copy_from(values.getIntrusivePtr());
  }
  return_freed_memory();
}

std::vector<PlannedBucket> plan_layout(const RunConfig& config, const NamedTensors& parameters,
                                       const ModelUnits& units, const RanksOfRun& ranks, int rank,
                                       const Layout::Named& placements) {
  const bool share = shares_parameters(config, ranks);
  return plan_strategy(config.parallel.strategy, parameters, &units, grid_of(config, ranks.size), rank,
                       whole_options(config, share), sharded_options(config, share), placements);
}

std::string describe_layout(const RunConfig& config, const RanksOfRun& ranks) {
  const std::string& strategy = config.parallel.strategy;
  const int stage = stage_of(strategy);
  const Grid grid = grid_of(config, ranks.size);
  std::string text = stage > 0 ? fmt::format("ZeRO-{}", stage) : strategy + " gradients";
  if (stage > 0 && config.parallel.replicas > 1)
    text += fmt::format(", {} replicas of {} shards", config.parallel.replicas, grid.size({"dp_shard"}));
  if (grid.size(kContextAxes) > 1) {
    text += fmt::format(", samples over a ring of {} x Ulysses of {}", config.parallel.cp_ring,
                        config.parallel.cp_ulysses);
    if (stage > 0) text += fmt::format(" (cp_fsdp_mode {})", config.parallel.cp_fsdp_mode);
  }
  if (const std::int64_t tp = config.parallel.tp; tp > 1)
    text += fmt::format(
        ", matrices sharded over {}{}", tp,
        config.parallel.sequence_parallel && kind_of(config).cuts_tokens ? "(sequence parallel)" : "");
  if (config.parallel.ep > 1) text += fmt::format(", experts sharded over {} ranks", config.parallel.ep);
  if (const auto& p = config.parallel; p.pp > 1)
    text += fmt::format(", layers in {} stages on {} ranks ({})", p.pp * p.stages_per_rank, p.pp, p.schedule);
  if (strategy != "naive" && config.parallel.overlap) text += ", summed during backward";
  if (grid.size(kDataAxes) > 1 && shares_parameters(config, ranks)) text += ", one copy of the parameters";
  if (device_kind(config) == "cuda") text += fmt::format(", on GPUs over {}", backend_of(config, ranks.size));
  if (config.parallel.offload) text += ", gradients and states in host memory";
  return text;
}

DataParallelPlan make_plan(const RunConfig& config, std::int64_t numel, const RanksOfRun& ranks) {
  const std::string& strategy = config.parallel.strategy;
  const Grid grid = grid_of(config, ranks.size);
  const AxisSet sharded = sharded_axes(config);
  int states = 2;  // moments of AdamW
  if (config.optimizer.kind == "sgd") states = config.optimizer.momentum > 0 ? 1 : 0;
  const std::int64_t most_packs = split_rows(config.batch.packs_per_step, grid.size(kSampleAxes))[0];
  const std::int64_t at_a_time = config.batch.packs_per_micro_batch;
  DataParallelPlan plan{.bytes = element_bytes(scalar_type(config.train.dtype), states),
                        .stage = stage_of(strategy),
                        .shards = grid.size(sharded),
                        .replicas = grid.size(without(kDataAxes, sharded)),
                        .share_parameters = grid.size(kDataAxes) > 1 && shares_parameters(config, ranks),
                        .reduce_once = config.parallel.reduce_once,
                        .micro_batches = (most_packs + at_a_time - 1) / at_a_time};
  if (config.train.dtype == "bfloat16" && !config.train.fp32_gradients) plan.bytes.gradient = 2;
  if (config.parallel.ep > 1)
    plan.dealt_copies = grid.size(data_axes(grid)) / static_cast<int>(config.parallel.ep);
  plan.numel = numel;
  return plan;
}

DataParallelPlan plan_of(const RunConfig& config, DataParallel& layout, std::int64_t rounds,
                         const RanksOfRun& ranks) {
  DataParallelPlan plan = make_plan(config, 0, ranks);
  for (const Bucket& bucket : layout.buckets())
    for (const Slot& slot : bucket.plan.slots) {
      plan.numel += slot.numel;
      if (cut_along_data(bucket.plan.sync, layout.mesh().grid())) plan.dealt += slot.numel;
    }
  if (rounds > 0) plan.micro_batches = rounds;
  if (const auto* sharded = dynamic_cast<const FullySharded*>(&layout)) {
    // whole_numel() counts padding, numel does not.
    plan.dealt_whole = std::min(sharded->whole_dealt_numel(), plan.dealt);
    plan.whole = std::min(sharded->whole_numel(), plan.numel);
  }
  return plan;
}

}  // namespace isograd
