// verify for a model of one's own, on ranks that are threads of this process.
#pragma once

#include "isograd/cxx20.hpp"

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "isograd/pipeline_modules.hpp"
#include "isograd/verify.hpp"
#include "isograd/world.hpp"

namespace isograd {

struct VerifyOptions {
  int ranks = 2;
  // The ranks' axes, the outermost first: {{"dp_shard", 2}, {"tp", 2}}, as many ranks as they make. Batches
  // are dealt along the data axes, and VerifyModel::cut gets the mesh. Not given: `ranks` that see different
  // data.
  std::vector<Axis> axes{};
  at::ScalarType dtype = at::kFloat;  // the run's precision
  StepOptions step{};
  DeclaredLoss loss{};
  MakeNormalizer make_normalizer{};  // of the loop under test; not given: the one of `loss`
  // Parameters are compared after so many updates of plain SGD and of `optimizer`. 0: only the first step's
  // gradient is seen.
  int updates = 2;
  OptimizerOptions optimizer = AdamWOptions{};
};

// A model under token cross entropy: named parameters, and a function of the batch that gives logits [T, V].
// `units`: what ZeRO-3 shards apart, the root being the whole model; not given: all parameters are one unit.
VerifyModel verify_model(std::vector<std::pair<std::string, at::Tensor>> named,
                         std::function<at::Tensor(const Batch&)> logits,
                         std::optional<ModelUnits> units = {});

// A module whose `logits(*module, batch)` gives them. Parameters may be drawn from any generator: all ranks
// take rank 0's. Under zero3 the whole module is one unit, also where members of it are Sharded: their own
// gathering is proven by the overload with blocks.
template <typename Module, typename Logits>
VerifyModel verify_model(std::shared_ptr<Module> module, Logits logits) {
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (auto& item : module->named_parameters()) named.emplace_back(item.key(), item.value());
  VerifyModel model =
      verify_model(std::move(named), [module, logits](const Batch& batch) { return logits(*module, batch); });
  for (auto& item : module->named_buffers()) model.buffers.emplace_back(item.key(), item.value());
  return model;
}

// The same of a module whose blocks are Sharded: under zero3 they are gathered and freed one at a time, as in
// training. `blocks` in the order in which its forward calls them.
//
//   verify_model(isograd::Sharded<Model>(module), {module->blocks.begin(), module->blocks.end()}, logits)
template <typename Module, typename Logits>
VerifyModel verify_model(const Sharded<Module>& module, std::vector<UnitHandle> blocks, Logits logits) {
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (auto& item : module->named_parameters()) named.emplace_back(item.key(), item.value());
  const auto whole = module.ptr();
  VerifyModel model = verify_model(
      std::move(named), [whole, logits](const Batch& batch) { return logits(*whole, batch); },
      ModelUnits{.root = module, .blocks = std::move(blocks)});
  for (auto& item : module->named_buffers()) model.buffers.emplace_back(item.key(), item.value());
  return model;
}

// A model in stages: a list of modules whose last one gives logits [T, V], made with all of them for the
// oracle and split over the ranks along pp (VerifyOptions::axes) for the layouts. Of the dtype that
// PipelineModelOptions say.
VerifyModel verify_model(PipelineModel model, const PipelineOptions& options);

// isograd's own strategies: naive, overlapped, bucketed, zero1, zero2, zero3. ConfigError on another name.
LayoutUnderTest verify_layout(const std::string& strategy);
std::vector<LayoutUnderTest> verify_layouts(const std::vector<std::string>& strategies);

// One step over `batches`, the whole of it: data rank r of W has batches r, r + W, ...; it may have none.
// Fill in sample_ids and sample_targets where the loss needs them. `make_model` is called on every rank, one
// at a time, and gets rank 0's parameters.
Verdict verify(const MakeVerifyModel& make_model, const MicroBatches& batches,
               const std::vector<LayoutUnderTest>& layouts, const VerifyOptions& options = {});

// The same on ranks that are there already; collective over `world`. options.ranks is not looked at.
Verdict verify(const MakeVerifyModel& make_model, const MicroBatches& batches,
               const std::vector<LayoutUnderTest>& layouts, const VerifyOptions& options, World& world);

}  // namespace isograd
