#include "train/build.hpp"

#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <map>
#include <set>
#include <utility>

#include "base/memory.hpp"
#include "base/number_ranges.hpp"
#include "base/pattern.hpp"
#include "base/refuse.hpp"
#include "isograd/expert_parallel.hpp"
#include "isograd/tensor_parallel.hpp"
#include "loss/checks.hpp"
#include "model/attention/attention.hpp"
#include "model/safetensors.hpp"
#include "optim/optimizers.hpp"
#include "train/config_table.hpp"
#include "train/device.hpp"
#include "train/rules.hpp"
#include "train/task.hpp"

namespace isograd {
namespace {

std::string stripped(const std::string& text) {
  const auto first = text.find_first_not_of(" \t"), last = text.find_last_not_of(" \t");
  return first == std::string::npos ? "" : text.substr(first, last - first + 1);
}

bool is_number(const std::string& text) {
  return !text.empty() && std::all_of(text.begin(), text.end(),
                                      [](unsigned char letter) { return std::isdigit(letter) != 0; });
}

std::string layer_of(const std::string& name) {
  for (std::size_t begin = 0; begin < name.size();) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    if (is_number(name.substr(begin, end - begin))) return name.substr(0, end);
    begin = end + 1;
  }
  const std::size_t last = name.rfind('.');
  return last == std::string::npos ? name : name.substr(0, last);
}

std::string part_of(const std::string& by, const std::string& name) {
  if (by == "layers") return layer_of(name);
  if (by == "groups") return name.find(".experts.") == std::string::npos ? "dense" : "experts";
  return name;
}

}  // namespace

at::ScalarType scalar_type(const std::string& dtype) {
  const FloatType* const found = float_type(dtype, &FloatType::name);
  if (found && found->type != at::kHalf) return found->type;
  refuse("train.dtype", dtype, "float64, float32 or bfloat16", "Choose one of them");
}

DecoderConfig configured_shape(const RunConfig& config) {
  if (!config.model.load.empty()) return read_hf_config(config.model.load);
  DecoderConfig shape = config.model.shape;
  shape.experts.sigmoid = shape.family == "dots1";
  for (std::int64_t layer = 0; layer < shape.layers; ++layer)
    if (layer < config.model.dense_layers || (layer + 1) % config.model.experts_every != 0)
      shape.experts.dense_layers.push_back(layer);
  return shape;
}

Mean mean_of(const RunConfig& config) {
  static const std::map<std::string, Mean> means = {{"sample_mean", Mean::kSamples},
                                                    {"weighted_mean", Mean::kWeights},
                                                    {"fixed", Mean::kFixed},
                                                    {"none", Mean::kNone}};
  const auto found = means.find(config.loss.kind);
  return found == means.end() ? Mean::kTargets : found->second;
}

std::unique_ptr<Normalizer> make_normalizer(Mean mean, double fixed, const NormalizerOptions& options) {
  if (mean == Mean::kSamples) return std::make_unique<SampleMean>(options);
  if (mean == Mean::kWeights) return std::make_unique<WeightedMean>(options);
  if (mean == Mean::kFixed) return std::make_unique<FixedDenominator>(fixed, options);
  if (mean == Mean::kNone) return std::make_unique<NoDenominator>(options);
  return std::make_unique<TokenMean>(options);
}

std::unique_ptr<Normalizer> make_normalizer(const RunConfig& config, int ranks) {
  const int replicas = normalises_by_replica(config) ? grid_of(config, ranks).size({"dp_replicate"}) : 1;
  return make_normalizer(mean_of(config), config.loss.denominator, {.replicas = replicas});
}

Schedule make_schedule(const RunConfig& config) {
  Schedule schedule = config.schedule;
  schedule.total = config.train.steps;
  return schedule;
}

std::variant<SgdOptions, AdamWOptions> optimizer_options(const RunConfig& config) {
  auto groups = parameter_groups_of(config, "optimizer.groups");
  if (config.optimizer.kind == "adamw") {
    AdamWOptions options = config.optimizer.adamw;
    options.learning_rate = config.schedule.peak;
    options.groups = std::move(groups);
    return options;
  }
  if (config.optimizer.kind == "sgd")
    return SgdOptions{.learning_rate = config.schedule.peak,
                      .momentum = config.optimizer.momentum,
                      .weight_decay = config.optimizer.adamw.weight_decay,
                      .groups = std::move(groups)};
  refuse("optimizer.kind", config.optimizer.kind, "adamw or sgd", "Choose one of them");
}

std::unique_ptr<Optimizer> make_optimizer(const RunConfig& config) {
  const auto options = optimizer_options(config);
  const auto* plain = std::get_if<SgdOptions>(&options);
  return plain ? sgd(*plain) : adamw(std::get<AdamWOptions>(options));
}

namespace {

using RefuseGroup = std::function<void(bool wrong, const std::string& what, const std::string& action)>;

// Reads the texts of a key of groups, each a pattern of its own. `example`: of one, as it is written; `take`
// gets a pattern and what follows the last colon, without blanks around them.
void read_groups(const std::string& where, const char* key, const std::vector<std::string>& texts,
                 const char* example,
                 const std::function<void(const std::string& pattern, const std::string& rest,
                                          const RefuseGroup& refuse_if)>& take) {
  std::set<std::string> patterns;
  for (const std::string& text : texts) {
    if (text.size() > kMostPattern)
      refuse(where, fmt::format("{} with {} characters", key, text.size()),
             fmt::format("at most {}", kMostPattern), "Shorten the pattern");
    const RefuseGroup refuse_if = [&](bool wrong, const std::string& what, const std::string& action) {
      if (wrong) refuse(where, fmt::format("{} with \"{}\", {}", key, text, what), example, action);
    };
    const auto colon = text.rfind(':');
    refuse_if(colon == std::string::npos, "which has no colon", "Write the pattern, a colon and the rest");
    const std::string pattern = stripped(text.substr(0, colon));
    refuse_if(pattern.empty(), "which names no parameter", "Write a pattern before the colon");
    take(pattern, stripped(text.substr(colon + 1)), refuse_if);
    refuse_if(!patterns.insert(pattern).second, "a pattern that is there already",
              "Leave one of the two out");
  }
}

}  // namespace

std::vector<ClipGroup> clip_groups_of(const RunConfig& config, const std::string& where) {
  std::vector<ClipGroup> groups;
  read_groups(where, "train.clip_groups", config.train.clip_groups,
              "\"PATTERN: LIMIT\", as in \"*.experts.*: 0.5\"",
              [&](const std::string& pattern, const std::string& rest, const RefuseGroup& refuse_if) {
                const double limit = number_in<double>(rest).value_or(0);
                refuse_if(!std::isfinite(limit) || limit <= 0, "whose limit is no number above 0",
                          "Give a norm above 0, or leave the group out");
                groups.push_back({pattern, limit});
              });
  return groups;
}

std::vector<ParameterGroup> parameter_groups_of(const RunConfig& config, const std::string& where) {
  std::vector<ParameterGroup> groups;
  read_groups(
      where, "optimizer.groups", config.optimizer.groups,
      "\"PATTERN: rate=FACTOR weight_decay=NUMBER\", as in \"*embed_tokens*: rate=0.1\"",
      [&](const std::string& pattern, std::string rest, const RefuseGroup& refuse_if) {
        std::ranges::replace(rest, ',', ' ');
        rest = stripped(rest);
        std::map<std::string, double> settings;
        for (std::size_t end = 0; !rest.empty(); rest = stripped(rest.substr(end))) {
          end = std::min(rest.find_first_of(" \t"), rest.size());
          const std::string setting = rest.substr(0, end);
          const auto equals = setting.find('=');
          const std::string name = setting.substr(0, equals);
          refuse_if(name != "rate" && name != "weight_decay", fmt::format("with \"{}\"", setting),
                    "Name rate or weight_decay, or both");
          const double number =
              number_in<double>(equals == std::string::npos ? "" : setting.substr(equals + 1)).value_or(-1);
          refuse_if(!std::isfinite(number) || number < 0,
                    fmt::format("whose {} is no number of 0 or more", name),
                    fmt::format("Write {}=NUMBER without blanks", name));
          refuse_if(!settings.emplace(name, number).second, fmt::format("with two of {}", name),
                    "Leave one of the two out");
        }
        refuse_if(settings.empty(), "which sets nothing",
                  "Write rate=FACTOR, weight_decay=NUMBER or both behind the colon");
        ParameterGroup group{.pattern = pattern};
        if (settings.contains("rate")) group.rate = settings["rate"];
        if (settings.contains("weight_decay")) group.weight_decay = settings["weight_decay"];
        groups.push_back(std::move(group));
      });
  return groups;
}

void check_groups(const RunConfig& config, const NamedTensors& named) {
  const auto check_each = [&](const char* key, const auto& groups) {
    std::vector<std::string> patterns;
    for (const auto& group : groups) patterns.push_back(group.pattern);
    check_patterns(key, patterns, named);
  };
  check_each("train.clip_groups", clip_groups_of(config, "train.clip_groups"));
  check_each("optimizer.groups", parameter_groups_of(config, "optimizer.groups"));
}

NormParts norm_parts_of(const RunConfig& config, const NamedTensors& named) {
  const std::string& by = config.train.part_norms;
  NormParts parts;
  if (by == "off") return parts;
  std::map<std::string, int> places, of_parameter;
  for (const auto& [name, tensor] : named) {
    if (!tensor.requires_grad()) continue;
    const std::string part = part_of(by, name);
    const auto [place, fresh] = places.emplace(part, static_cast<int>(parts.names.size()));
    if (fresh) parts.names.push_back(part);
    of_parameter[name] = place->second;
  }
  parts.of = [of_parameter = std::move(of_parameter)](const std::string& name) {
    const auto found = of_parameter.find(name);
    return found == of_parameter.end() ? -1 : found->second;
  };
  return parts;
}

ForwardLossTerms inside(const UnitHandle& unit, ForwardLossTerms forward) {
  return [unit, forward = std::move(forward)](const Batch& batch) {
    LossTerms terms;
    const auto sums = unit.run({}, [&](const std::vector<at::Tensor>&) {
      terms = forward(batch);
      std::vector<at::Tensor> results;
      for (LossTerm& term : terms) results.push_back(std::exchange(term.sum, at::Tensor()));
      return results;
    });
    for (std::size_t i = 0; i < terms.size(); ++i) terms[i].sum = sums[i];
    return terms;
  };
}

ForwardLossTerms on_device(at::Device device, ForwardLossTerms forward) {
  if (device.is_cpu()) return forward;
  return [device, forward = std::move(forward)](const Batch& batch) {
    // Computing what has no loss as well costs less than asking the device how much of it there is.
    const FixedShapes mark(FixedShapes::wanted() || 2 * batch.num_targets() >= batch.num_tokens());
    return forward(to_device(batch, device));
  };
}

CutOptions cut_options(const Task& task, const Mesh& mesh) {
  CutOptions options;
  if (mesh.size(kContextAxes) > 1) options = task.cut_options();
  options.ring = static_cast<int>(task.config().parallel.cp_ring);
  options.ulysses = static_cast<int>(task.config().parallel.cp_ulysses);
  return options;
}

MicroBatches own_parts(const Task& task, const Mesh& mesh, MicroBatches micro_batches) {
  if (mesh.size(kContextAxes) == 1) return micro_batches;
  return cut_micro_batches(micro_batches, cut_options(task, mesh), mesh.place(kContextAxes));
}

// ---- where the axes meet ----

namespace {

// A value of parallel.strategy. Nothing else of a run interprets these names.
struct StrategyRow {
  const char* name;
  int stage = 0;            // of ZeRO; 0: nothing is sharded
  bool may_share = true;    // one copy of the parameters, if share_parameters = "auto"
  bool one_by_one = false;  // each parameter is a bucket
  // Null: the strategy takes the model's units (fully_shard), not its parameters.
  std::unique_ptr<DataParallel> (*make)(TrainableParameters, const Mesh&, DataParallelOptions) = bucketed;
  std::vector<PlannedBucket> (*plan)(TrainableParameters, const Grid&, int,
                                     const DataParallelOptions&) = plan_bucketed;
};
constexpr StrategyRow kStrategies[] = {
    {.name = "naive", .may_share = false, .make = naive, .plan = plan_naive},
    {.name = "overlapped", .may_share = false, .one_by_one = true},
    {.name = "bucketed"},
    {.name = "zero1", .stage = 1},
    {.name = "zero2", .stage = 2},
    {.name = "zero3", .stage = 3, .make = nullptr, .plan = nullptr}};

const StrategyRow& strategy_named(const std::string& name) {
  const auto row = std::ranges::find(kStrategies, name, &StrategyRow::name);
  if (row != std::end(kStrategies)) return *row;
  refuse("parallel.strategy", name, fmt::format("{}", fmt::join(strategy_names(), ", ")),
         "Choose one of them");
}

// Experts are sharded over neighbouring ranks among those that see different tokens.
Grid with_expert_view(const Grid& grid, std::int64_t experts_ranks) {
  if (experts_ranks == 1) return grid;
  const AxisSet data = data_axes(grid);
  const auto ep = static_cast<int>(experts_ranks);
  return grid.viewed(data, {{"edp", grid.size(data) / ep}, {kExpertAxis, ep}});
}

// The grid of ranks that see different tokens.
Grid data_grid_of(const RunConfig& config, int ranks) {
  const auto& parallel = config.parallel;
  DataAxes sizes{.dp_replicate = static_cast<int>(parallel.replicas),
                 .cp_ring = static_cast<int>(parallel.cp_ring),
                 .cp_ulysses = static_cast<int>(parallel.cp_ulysses)};
  const Grid grid = data_grid(ranks, sizes);
  if (stage_of(parallel.strategy) > 0) return grid;
  sizes.dp_replicate = grid.size(kSampleAxes);  // each keeps everything
  return data_grid(ranks, sizes);
}

TensorParallelOptions tensor_options(const RunConfig& config) {
  return {.sequence_parallel = config.parallel.sequence_parallel,
          .overlap = tensor_overlap_named(config.parallel.tensor_overlap)};
}

PipelineOptions pipeline_options(const RunConfig& config) {
  return {.schedule = config.parallel.schedule,
          .stages_of_rank = static_cast<int>(config.parallel.stages_per_rank),
          .table = std::nullopt};
}

// ---- the layout of a run ----

// The options of a strategy of whole parameters. ConfigError: one of units, and a model without.
DataParallelOptions chosen(const StrategyRow& row, const ModelUnits* units, DataParallelOptions options) {
  if (!row.make && !units)
    refuse(row.name, "a model without units", "VerifyModel::units, as verify_model() gives it",
           "Make the model with verify_model(), or fill in its units");
  options.stage = row.stage;
  if (row.one_by_one) options.bucket_bytes = 1, options.first_bucket_bytes = 0;
  return options;
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
    if (std::ranges::find(own, name, &NamedParameter::name) != own.end()) order.push_back(name);
  if (order.size() != own.size()) order.clear();
  return order;
}

FullyShardOptions with(FullyShardOptions options, const Layout::Named& placements) {
  options.placements = placements;
  return options;
}

bool shares_parameters(const RunConfig& config, const RanksOfRun& ranks) {
  const std::string& asked = config.parallel.share_parameters;
  if (asked != "auto") return asked == "on";
  return may_share_parameters(config.parallel.strategy) && ranks.host_memory && device_kind(config) == "cpu";
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

std::vector<std::string> strategy_names() {
  std::vector<std::string> names;
  for (const StrategyRow& row : kStrategies) names.emplace_back(row.name);
  return names;
}

int stage_of(const std::string& strategy) { return strategy_named(strategy).stage; }

bool may_share_parameters(const std::string& strategy) { return strategy_named(strategy).may_share; }

Grid grid_of(const RunConfig& config, int ranks) {
  check_axes(layout_numbers(config, ranks));
  const auto tp = static_cast<int>(config.parallel.tp), pp = static_cast<int>(config.parallel.pp);
  if (tp == 1 && pp == 1) return with_expert_view(data_grid_of(config, ranks), config.parallel.ep);
  std::vector<Axis> axes = data_grid_of(config, ranks / (tp * pp)).axes();
  if (tp > 1) axes.push_back({"tp", tp});  // neighbours: they communicate most
  if (pp > 1) axes.insert(axes.begin(), {kStageAxis, pp});
  const Grid grid = with_expert_view(Grid(axes, ranks), config.parallel.ep);
  const TaskKind& kind = kind_of(config);
  return kind.view && tp > 1 ? kind.view(config, grid) : grid;
}

bool model_parallel(const RunConfig& config) {
  return config.parallel.tp > 1 || config.parallel.ep > 1 || config.parallel.pp > 1;
}

bool cuts_backwards(const RunConfig& config) {
  return config.parallel.pp > 1 && schedule_named(config.parallel.schedule).halves;
}

AxisSet sharded_axes(const RunConfig& config) {
  if (stage_of(config.parallel.strategy) == 0) return kDataAxes;  // gradients are summed over all at once
  const std::string& mode = config.parallel.cp_fsdp_mode;
  if (mode == "all") return {"dp_shard", "cp_ring", "cp_ulysses"};
  if (mode == "ulysses_only") return {"dp_shard", "cp_ulysses"};
  if (mode == "ring_only") return {"dp_shard", "cp_ring"};
  if (mode == "none") return {"dp_shard"};
  refuse("parallel.cp_fsdp_mode", mode, "all, ulysses_only, ring_only or none", "Choose one of them");
}

void check_expert_parallel(const RunConfig& config) {
  if (config.parallel.ep == 1) return;
  const ModelNumbers model{.experts = configured_shape(config).experts.count};
  check(layout_numbers(config, 1), model, LayoutRule::kExperts, LayoutRule::kExperts);
}

void check_decoder_parallel(const RunConfig& config, int ranks) {
  const auto& parallel = config.parallel;
  if (parallel.tp == 1 && parallel.ep == 1 && parallel.pp == 1 && parallel.cp_ulysses == 1) return;
  const LayoutNumbers layout = layout_numbers(config, ranks);
  const ModelNumbers model = model_numbers(configured_shape(config));
  check(layout, model, LayoutRule::kExperts, LayoutRule::kHalves);
  if (parallel.pp > 1 && config.loss.balance != 0 && config.loss.balance_scope == "micro_batch" &&
      config.loss.balance_over == "model")
    refuse("loss.balance_scope",
           "micro_batch with loss.balance_over = \"model\" and parallel.pp, whose stages compute "
           "different micro-batches at a time",
           "step, or a balance loss of each layer",
           "Set loss.balance_scope = \"step\", or loss.balance_over = \"layers\"");
  check(layout, model, LayoutRule::kTensorRanks, LayoutRule::kTokenOverlap);
}

Layout::Named decoder_placements(DecoderLM& model, const RunConfig& config, const Grid& grid) {
  const auto& parallel = config.parallel;
  Layout::Named all = decoder_placements(model, grid, tensor_options(config));
  if (parallel.ep > 1) all = expert_placements(model, grid, std::move(all));
  if (parallel.pp == 1) return all;
  const auto [schedule, stages, table] = pipeline_options(config);
  const int ranks = static_cast<int>(parallel.pp);
  return stage_placements(model, grid, make_pipeline(schedule, ranks, stages, ranks).rank_of_stage,
                          std::move(all));
}

ComposedDecoder compose_decoder(DecoderLM& model, const RunConfig& config, const Mesh& mesh) {
  const auto& parallel = config.parallel;
  Layout layout = cut_decoder(model, mesh, tensor_options(config));
  if (parallel.ep > 1)
    layout = shard_experts(model, mesh, layout.placements(),
                           {.overlap = expert_overlap_named(parallel.expert_overlap)});
  if (parallel.pp == 1) return {.layout = std::move(layout)};
  auto pipeline = std::make_shared<Pipeline>(mesh, pipeline_options(config));
  layout = split_decoder(model, mesh, pipeline, layout.placements());
  return {.layout = std::move(layout), .pipeline = std::move(pipeline)};
}

void attend_over(ReferenceModel& model, const Mesh& mesh, bool causal) {
  if (mesh.size(kContextAxes) == 1) return;
  model.set_attention([over = ContextAttention(mesh, causal), causal](
                          const Batch& batch, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    return batch.cut ? over(batch, q, k, v) : variable_length_attention(q, k, v, batch, causal);
  });
}

NamedTensors held_parameters(const NamedTensors& parameters, const Layout::Named& placements,
                             const Grid& grid, int rank) {
  std::set<std::string> elsewhere;
  for (const auto& [name, placement] : placements)
    if (!holds(placement, grid, rank)) elsewhere.insert(name);
  NamedTensors held = parameters;
  std::erase_if(held, [&](const auto& parameter) { return elsewhere.contains(parameter.first); });
  return held;
}

std::unique_ptr<DataParallel> make_strategy(const std::string& strategy, const NamedTensors& parameters,
                                            const ModelUnits* units, const Mesh& mesh,
                                            DataParallelOptions options, const FullyShardOptions& sharded,
                                            const Layout::Named& placements) {
  const StrategyRow& row = strategy_named(strategy);
  options = chosen(row, units, std::move(options));
  if (!row.make) return fully_shard(units->root, parameters, units->blocks, mesh, with(sharded, placements));
  TrainableParameters own = trainable(parameters, placements, mesh.grid(), mesh.rank());
  options.order = order_of(options.order, own);
  return row.make(std::move(own), mesh, std::move(options));
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
  std::size_t bytes = 0;
  for (const auto& [name, parameter] : parameters) {
    at::Tensor values = at::zeros(parameter.sizes(), parameter.options().device(at::kCPU));
    const bool elsewhere = placed && !placed->parameter(name).held;
    if (!elsewhere) {
      own(name, values);  // the same bits on any device
      // Made whole, then cut.
      bytes += placed ? values.element_size() * static_cast<std::size_t>(c10::multiply_integers(
                                                    placed->parameter(name).placement.whole_shape))
                      : values.nbytes();
    }
    values = values.to(device);
    parameter.unsafeGetTensorImpl()->shallow_copy_from(values.getIntrusivePtr());
  }
  return_freed_memory(bytes);
}

std::vector<PlannedBucket> plan_layout(const RunConfig& config, const NamedTensors& parameters,
                                       const ModelUnits& units, const RanksOfRun& ranks, int rank,
                                       const Layout::Named& placements) {
  const bool share = shares_parameters(config, ranks);
  const Grid grid = grid_of(config, ranks.size);
  const StrategyRow& row = strategy_named(config.parallel.strategy);
  if (!row.plan)
    return plan_fully_sharded(units.root, parameters, units.blocks, grid, rank,
                              with(sharded_options(config, share), placements));
  return row.plan(trainable(parameters, placements, grid, rank), grid, rank,
                  chosen(row, &units, whole_options(config, share)));
}

std::string describe_layout(const RunConfig& config, const RanksOfRun& ranks) {
  const std::string& strategy = config.parallel.strategy;
  const int stage = stage_of(strategy);
  const Grid grid = grid_of(config, ranks.size);
  std::string text = stage > 0 ? strategy : strategy + " gradients";
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
  if (strategy_named(strategy).make != naive && config.parallel.overlap) text += ", summed during backward";
  if (grid.size(kDataAxes) > 1 && shares_parameters(config, ranks)) text += ", one copy of the parameters";
  if (device_kind(config) == "cuda") text += fmt::format(", on GPUs over {}", backend_of(config, ranks.size));
  if (config.parallel.offload) text += ", gradients and states in host memory";
  return text;
}

ElementBytes element_bytes(at::ScalarType parameters, int states) {
  if (parameters == at::kDouble) return {.parameter = 8, .gradient = 8, .master = 0, .state = 8 * states};
  const bool rounded = parameters != at::kFloat;
  return {.parameter = rounded ? 2 : 4, .gradient = 4, .master = rounded ? 4 : 0, .state = 4 * states};
}

SharedElements shared_elements(const SyncAxes& sync, const Grid& grid, const AxisSet& asked,
                               std::int64_t numel, std::int64_t whole) {
  const AxisSet sharded = sharded_along(grid, sync, asked);
  return {.numel = numel,
          .whole = whole,
          .shards = grid.size(sharded),
          .replicas = grid.size(without(sync.summed, sharded))};
}

std::vector<SharedElements> shared_elements(DataParallel& layout, const AxisSet& asked, bool padded) {
  const Grid& grid = layout.mesh().grid();
  const auto* stage3 = dynamic_cast<const FullySharded*>(&layout);
  // Experts are in other numbers of shards than all else; among those of one number it is all the same.
  std::int64_t experts = stage3 ? stage3->whole_expert_numel() : 0,
               rest = stage3 ? stage3->whole_numel() - experts : 0;
  std::vector<SharedElements> result;
  for (const Bucket& bucket : layout.buckets()) {
    std::int64_t numel = padded ? bucket.plan.numel : 0;
    if (!padded)
      for (const Slot& slot : bucket.plan.slots) numel += slot.numel;
    std::int64_t& left = cut_along_data(bucket.plan.sync, grid) ? experts : rest;
    result.push_back(shared_elements(bucket.plan.sync, grid, asked, numel, std::min(left, numel)));
    left -= result.back().whole;
  }
  return result;
}

DataParallelPlan make_plan(const RunConfig& config, const RanksOfRun& ranks) {
  int states = 2;  // moments of AdamW
  if (config.optimizer.kind == "sgd") states = config.optimizer.momentum > 0 ? 1 : 0;
  ElementBytes bytes = element_bytes(scalar_type(config.train.dtype), states);
  if (config.train.dtype == "bfloat16" && !config.train.fp32_gradients) bytes.gradient = 2;
  LayoutNumbers layout = layout_numbers(config, ranks.size);
  layout.samples = config.batch.packs_per_step;
  layout.shares_parameters = shares_parameters(config, ranks);
  return make_plan(layout, bytes);
}

DataParallelPlan plan_of(const RunConfig& config, DataParallel& layout, std::int64_t rounds,
                         const RanksOfRun& ranks) {
  DataParallelPlan plan = make_plan(config, ranks);
  for (const Bucket& bucket : layout.buckets())
    for (const Slot& slot : bucket.plan.slots)
      plan.elements.at(cut_along_data(bucket.plan.sync, layout.mesh().grid()) ? 1 : 0).numel += slot.numel;
  if (rounds > 0) plan.micro_batches = rounds;
  if (const auto* sharded = dynamic_cast<const FullySharded*>(&layout)) {
    // whole_numel() counts padding, numel does not.
    const std::int64_t experts = sharded->whole_expert_numel();
    plan.elements[0].whole = std::min(sharded->whole_numel() - experts, plan.elements[0].numel);
    if (experts > 0) plan.elements.at(1).whole = std::min(experts, plan.elements[1].numel);
  }
  return plan;
}

}  // namespace isograd
