#include "bench/strategy.hpp"

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
       .tensor = Strategy::Tensor::kSequenceParallel},
      {.name = "tensor-whole",
       .title = "tensor, whole tokens",
       .standard = false,
       .tensor = Strategy::Tensor::kWholeTokens},
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

Prepared prepare(const Strategy& strategy, DecoderLM& model, const World& world) {
  if (strategy.tensor != Strategy::Tensor::kNone) {
    const Mesh mesh(world, Grid({{"tp", world.size}}));
    const Layout placed = cut_decoder(
        model, mesh, {.sequence_parallel = strategy.tensor == Strategy::Tensor::kSequenceParallel});
    return {make_strategy("bucketed", model.named(), nullptr, mesh, {}, {}, placed.placements()),
            [&model](const Batch& batch) -> LossTerms {
              return {{"cross_entropy",
                       cross_entropy_sum(model.logits(batch), batch.targets, {.shard = model.vocabulary()})}};
            }};
  }
  const Group& group = world.group;
  const auto forward = [&model](const Batch& batch) -> LossTerms {
    return {{"cross_entropy", cross_entropy_sum(model.logits(batch), batch.targets)}};
  };
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
