#include "train/compose.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/refuse.hpp"
#include "isograd/context_parallel.hpp"
#include "isograd/error.hpp"
#include "isograd/expert_parallel.hpp"
#include "isograd/pipeline_parallel.hpp"
#include "isograd/tensor_parallel.hpp"
#include "model/attention/attention.hpp"
#include "train/build.hpp"
#include "train/task_kind.hpp"

namespace isograd {
namespace {

// Experts are sharded over neighbouring ranks among those that see different tokens.
Grid with_expert_view(const Grid& grid, std::int64_t experts_ranks) {
  if (experts_ranks == 1) return grid;
  const AxisSet data = data_axes(grid);
  const int ranks = grid.size(data);
  if (ranks % experts_ranks != 0)
    isograd::refuse("parallel.ep",
                    fmt::format("{} for {} ranks that see different tokens", experts_ranks, ranks),
                    "a size that divides them", "Change parallel.ep or the ranks");
  const auto ep = static_cast<int>(experts_ranks);
  return grid.viewed(data, {{"edp", ranks / ep}, {kExpertAxis, ep}});
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

void check_stages(const RunConfig& config) {
  const auto& parallel = config.parallel;
  if (parallel.pp == 1) return;
  const auto refuse = [](std::string where, std::string found, std::string expected, std::string action) {
    isograd::refuse(std::move(where), std::move(found), std::move(expected), std::move(action));
  };
  const DecoderConfig shape = configured_shape(config);
  if (const std::int64_t stages = parallel.pp * parallel.stages_per_rank; stages > shape.layers)
    refuse("parallel.pp", fmt::format("{} stages for {} layers", stages, shape.layers),
           "a layer for each stage, or more", "Lower parallel.pp or parallel.stages_per_rank");
  if (cuts_backwards(config) && stage_of(parallel.strategy) == 3)
    refuse("parallel.schedule",
           fmt::format("{} under zero3, whose units compute gradients of weights with the others",
                       parallel.schedule),
           "a schedule of whole backwards, or a strategy that keeps parameters whole",
           "Set parallel.schedule = \"1f1b\" (or \"interleaved\"), or parallel.strategy = \"zero2\"");
  if (config.loss.balance != 0 && config.loss.balance_scope == "micro_batch" &&
      config.loss.balance_over == "model")
    refuse("loss.balance_scope",
           "micro_batch with loss.balance_over = \"model\" and parallel.pp, whose stages compute "
           "different micro-batches at a time",
           "step, or a balance loss of each layer",
           "Set loss.balance_scope = \"step\", or loss.balance_over = \"layers\"");
}

TensorParallelOptions tensor_options(const RunConfig& config) {
  return {.sequence_parallel = config.parallel.sequence_parallel,
          .overlap = tensor_overlap_named(config.parallel.tensor_overlap)};
}

}  // namespace

int stage_of(const std::string& strategy) {
  if (strategy == "zero1") return 1;
  if (strategy == "zero3") return 3;
  return strategy == "zero2" ? 2 : 0;
}

Grid grid_of(const RunConfig& config, int ranks) {
  const auto tp = static_cast<int>(config.parallel.tp), pp = static_cast<int>(config.parallel.pp);
  if (tp == 1 && pp == 1) return with_expert_view(data_grid_of(config, ranks), config.parallel.ep);
  if (ranks % (tp * pp) != 0)
    isograd::refuse(pp == 1   ? "parallel.tp"
                    : tp == 1 ? "parallel.pp"
                              : "parallel.tp times parallel.pp",
                    fmt::format("{} for {} ranks", tp * pp, ranks), "a size that divides the ranks",
                    "Change it or the ranks");
  std::vector<Axis> axes = data_grid_of(config, ranks / (tp * pp)).axes();
  if (tp > 1) axes.push_back({"tp", tp});  // neighbours: they communicate most
  if (pp > 1) axes.insert(axes.begin(), {kStageAxis, pp});
  const Grid grid = with_expert_view(Grid(axes, ranks), config.parallel.ep);
  const TaskKind& kind = kind_of(config);
  return kind.view && tp > 1 ? kind.view(config, grid) : grid;
}

bool held_together(const RunConfig& config) {
  return config.parallel.tp > 1 || config.parallel.ep > 1 || config.parallel.pp > 1;
}

bool cuts_backwards(const RunConfig& config) {
  const auto& parallel = config.parallel;
  const auto ranks = static_cast<int>(parallel.pp);
  return ranks > 1 && has_halves(make_pipeline(parallel.schedule, ranks,
                                               static_cast<int>(parallel.stages_per_rank), ranks));
}

void check_tensor_parallel(const RunConfig& config, const SplitOverTp& split) {
  const std::int64_t ranks = config.parallel.tp, ulysses = config.parallel.cp_ulysses;
  if (ranks == 1) return;
  auto all = split.others;
  if (split.heads > 0) all.insert(all.begin(), {"query heads", split.heads});
  for (const auto& [what, number] : all)
    if (ranks > number)
      isograd::refuse("parallel.tp", fmt::format("{} ranks for {} {}", ranks, number, what),
                      fmt::format("at most {}", number),
                      "Lower parallel.tp; more ranks fit along the other axes");
  if (ulysses == 1) return;
  const auto heads = split_rows(split.heads, static_cast<int>(ranks)),
             keys = split_rows(split.key_heads, static_cast<int>(ranks));
  const bool even = heads.front() == heads.back() && keys.front() == keys.back();
  const auto possible = even ? possible_ulysses(heads.front(), keys.front()) : std::vector<int>{1};
  if (std::find(possible.begin(), possible.end(), ulysses) == possible.end()) {
    const std::string rule =
        even ? fmt::format(
                   "{}: a rank along tp has {} query heads and {} key heads; cp_ulysses divides the first, "
                   "and divides the second or is a multiple of it",
                   fmt::join(possible, " or "), heads.front(), keys.front())
             : "a parallel.tp that divides the query heads and the key heads, which cp_ulysses divides "
               "further; or cp_ulysses = 1";
    isograd::refuse("parallel.cp_ulysses",
                    fmt::format("{} with parallel.tp = {}, for {} query heads and {} key heads", ulysses,
                                ranks, split.heads, split.key_heads),
                    rule, "Lower parallel.tp or parallel.cp_ulysses, or use parallel.cp_ring instead");
  }
}

AxisSet sharded_axes(const RunConfig& config) {
  if (stage_of(config.parallel.strategy) == 0) return kDataAxes;  // gradients are summed over all at once
  const std::string& mode = config.parallel.cp_fsdp_mode;
  if (mode == "all") return {"dp_shard", "cp_ring", "cp_ulysses"};
  if (mode == "ulysses_only") return {"dp_shard", "cp_ulysses"};
  if (mode == "ring_only") return {"dp_shard", "cp_ring"};
  if (mode == "none") return {"dp_shard"};
  isograd::refuse("parallel.cp_fsdp_mode", mode, "all, ulysses_only, ring_only or none",
                  "Choose one of them");
}

void check_expert_parallel(const RunConfig& config) {
  const std::int64_t ep = config.parallel.ep;
  if (ep == 1) return;
  const auto refuse = [&](std::string found, std::string expected, std::string action) {
    isograd::refuse("parallel.ep", fmt::format("{} {}", ep, found), std::move(expected), std::move(action));
  };
  const std::int64_t experts = configured_shape(config).experts.count;
  if (experts == 0)
    refuse("ranks for the experts of a model that has none", "a model.family with experts",
           "Leave parallel.ep out, or set model.family and model.experts");
  if (ep > experts)
    refuse(fmt::format("ranks for {} experts", experts), fmt::format("at most {}", experts),
           "Lower parallel.ep; more ranks fit along the other axes");
}

void check_decoder_parallel(const RunConfig& config) {
  check_stages(config);
  if (config.parallel.tp == 1) return;
  const DecoderConfig shape = configured_shape(config);
  SplitOverTp split{.heads = shape.heads,
                    .key_heads = shape.key_value_heads,
                    .others = {{"tokens of the vocabulary", shape.vocabulary}}};
  bool dense = false, experts = false;  // in some layer
  for (std::int64_t layer = 0; layer < shape.layers; ++layer)
    (shape.has_experts(layer) ? experts : dense) = true;
  if (dense) split.others.emplace_back("features of the feed-forward network", shape.feed_forward);
  if (experts) split.others.emplace_back("features of an expert", shape.experts.feed_forward);
  if (experts && shape.experts.shared_feed_forward > 0)
    split.others.emplace_back("features of the shared expert", shape.experts.shared_feed_forward);
  check_tensor_parallel(config, split);
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
    layout = deal_experts(model, mesh, layout.placements(),
                          {.overlap = expert_overlap_named(parallel.expert_overlap)});
  if (parallel.pp == 1) return {.layout = std::move(layout)};
  auto pipeline = std::make_shared<Pipeline>(mesh, pipeline_options(config));
  layout = split_decoder(model, mesh, pipeline, layout.placements());
  return {.layout = std::move(layout), .pipeline = std::move(pipeline)};
}

void attend_over(DecoderLM& model, const Mesh& mesh) {
  if (mesh.size(kContextAxes) == 1) return;
  model.set_attention([over = ContextAttention(mesh)](const Batch& batch, const at::Tensor& q,
                                                      const at::Tensor& k, const at::Tensor& v) {
    return batch.cut ? over(batch, q, k, v) : variable_length_attention(q, k, v, batch);
  });
}

}  // namespace isograd
