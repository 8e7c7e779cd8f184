#include "bench/cases/strategy.hpp"

#include "isograd/error.hpp"
#include "isograd/fully_shard.hpp"
#include "isograd/tensor_parallel.hpp"
#include "train/build.hpp"

namespace isograd {

const std::vector<Strategy>& strategies() {
  static const std::vector<Strategy> all = {
      {.name = "stage-0", .title = "stage 0", .options = {.stage = 0}},
      {.name = "zero-1", .title = "ZeRO-1", .options = {.stage = 1}},
      {.name = "zero-2", .title = "ZeRO-2", .options = {.stage = 2}},
      {.name = "zero-3", .title = "ZeRO-3", .options = {.stage = 3}, .peer = "fsdp2"},
      {.name = "shared", .title = "shared parameters", .options = {.share_parameters = true}},
      {.name = "zero-3-shared",
       .title = "ZeRO-3, shared parameters",
       .options = {.stage = 3, .share_parameters = true},
       .peer = "fsdp2"},
      {.name = "stage-0-late", .title = "stage 0, no overlap", .options = {.stage = 0, .overlap = false}},
      {.name = "zero-1-late",
       .title = "ZeRO-1, no overlap",
       .options = {.stage = 1, .overlap = false},
       .standard = false},
      {.name = "zero-2-late",
       .title = "ZeRO-2, no overlap",
       .options = {.stage = 2, .overlap = false},
       .standard = false},
      {.name = "zero-3-late",
       .title = "ZeRO-3, no prefetch",
       .options = {.stage = 3, .overlap = false},
       .peer = "fsdp2",
       .standard = false},
      {.name = "shared-late",
       .title = "shared, no overlap",
       .options = {.share_parameters = true, .overlap = false},
       .standard = false},
      {.name = "tensor",
       .title = "tensor, sequence parallel",
       .standard = false,
       .together = Strategy::Together::kSequenceParallel},
      {.name = "tensor-whole",
       .title = "tensor, whole tokens",
       .standard = false,
       .together = Strategy::Together::kWholeTokens},
      {.name = "tensor-weights",
       .title = "sequence parallel, weights meanwhile",
       .standard = false,
       .together = Strategy::Together::kSequenceParallel,
       .tensor_overlap = TensorOverlap::kWeights},
      {.name = "tensor-tokens",
       .title = "sequence parallel, tokens meanwhile",
       .standard = false,
       .together = Strategy::Together::kSequenceParallel,
       .tensor_overlap = TensorOverlap::kTokens},
      {.name = "tensor-whole-weights",
       .title = "whole tokens, weights meanwhile",
       .standard = false,
       .together = Strategy::Together::kWholeTokens,
       .tensor_overlap = TensorOverlap::kWeights},
      {.name = "expert",
       .title = "experts dealt to ranks",
       .standard = false,
       .together = Strategy::Together::kExperts},
      {.name = "expert-shared",
       .title = "experts dealt, the shared one meanwhile",
       .standard = false,
       .together = Strategy::Together::kExperts,
       .overlap = ExpertOverlap::kShared},
      {.name = "expert-halves",
       .title = "experts dealt to ranks, in halves",
       .standard = false,
       .together = Strategy::Together::kExperts,
       .overlap = ExpertOverlap::kHalves},
      {.name = "pipeline-1f1b",
       .title = "stages, 1f1b",
       .standard = false,
       .together = Strategy::Together::kStages,
       .schedule = "1f1b"},
      {.name = "pipeline-zb-h1",
       .title = "stages, zb-h1",
       .standard = false,
       .together = Strategy::Together::kStages,
       .schedule = "zb-h1"},
  };
  return all;
}

const Strategy& find_strategy(const std::string& name) {
  std::string names;
  for (const Strategy& strategy : strategies()) {
    if (strategy.name == name) return strategy;
    names += (names.empty() ? "" : ", ") + strategy.name;
  }
  throw ConfigError({.where = "isograd bench --strategy",
                     .found = name,
                     .expected = names,
                     .action = "Choose one of them"});
}

namespace {

// Each rank has tokens of its own, and its part of the experts.
Mesh experts_mesh(const World& world) {
  const Grid grid = data_grid(world.size, {.dp_replicate = world.size});
  return {world, grid.viewed(data_axes(grid), {{"edp", 1}, {kExpertAxis, world.size}})};
}

Prepared prepare_stages(const Strategy& strategy, DecoderLM& model, const World& world) {
  const Mesh mesh(world, Grid({{kStageAxis, world.size}}));
  const auto pipeline = std::make_shared<Pipeline>(mesh, PipelineOptions{.schedule = strategy.schedule});
  const Layout placed = split_decoder(model, mesh, pipeline);
  const NamedTensors own = held_parameters(model.named(), placed.placements(), mesh.grid(), world.rank);
  return {.layout = make_strategy("bucketed", own, nullptr, mesh, {}, {}, placed.placements()),
          .forward = [&model](const Batch& batch) -> LossTerms {
            const DecoderOutputs outputs = model.outputs(batch);
            if (outputs.passed_on.defined()) return {{"cross_entropy", outputs.passed_on}};
            return {{"cross_entropy", cross_entropy_sum(model.logits_of(outputs.hidden), batch.targets)}};
          },
          .options = through(*pipeline),
          .pipeline = pipeline};
}

}  // namespace

Prepared prepare(const Strategy& strategy, DecoderLM& model, const World& world) {
  const auto forward = [&model](const Batch& batch) -> LossTerms {
    return {{"cross_entropy", cross_entropy_sum(model.logits(batch), batch.targets)}};
  };
  if (strategy.together == Strategy::Together::kExperts) {
    const Mesh mesh = experts_mesh(world);
    const Layout placed = deal_experts(model, mesh, {}, {.overlap = strategy.overlap});
    return {make_strategy("bucketed", model.named(), nullptr, mesh, {}, {}, placed.placements()), forward};
  }
  if (strategy.together == Strategy::Together::kStages) return prepare_stages(strategy, model, world);
  if (strategy.one_batch()) {
    const Mesh mesh(world, Grid({{"tp", world.size}}));
    const Layout placed =
        cut_decoder(model, mesh,
                    {.sequence_parallel = strategy.together == Strategy::Together::kSequenceParallel,
                     .overlap = strategy.tensor_overlap});
    return {make_strategy("bucketed", model.named(), nullptr, mesh, {}, {}, placed.placements()),
            [&model](const Batch& batch) -> LossTerms {
              return {{"cross_entropy",
                       cross_entropy_sum(model.logits(batch), batch.targets, {.shard = model.vocabulary()})}};
            }};
  }
  const Group& group = world.group;
  const auto& options = strategy.options;
  if (options.stage < 3)
    return {make_strategy(options.stage == 0 ? "bucketed" : fmt::format("zero{}", options.stage),
                          model.named(), nullptr, group, options),
            forward};
  const ModelUnits units = model_units(model, RunConfig{});
  return {make_strategy("zero3", model.named(), &units, group, {},
                        {.share_parameters = options.share_parameters, .prefetch = options.overlap}),
          inside(units.root, forward)};
}

}  // namespace isograd
