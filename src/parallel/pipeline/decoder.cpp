// A decoder's layers in stages.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <charconv>
#include <set>

#include "isograd/model.hpp"
#include "isograd/pipeline_parallel.hpp"
#include "model/hooks.hpp"
#include "parallel/pipeline/stages.hpp"

namespace isograd {
namespace {

// Multiplications for a token, of its products alone: what a stage's time goes into.
double cost_of_layer(const DecoderConfig& config, std::int64_t layer) {
  const double hidden = static_cast<double>(config.hidden),
               heads = static_cast<double>((2 * config.heads + 2 * config.key_value_heads) * config.head_dim);
  double inner = static_cast<double>(config.feed_forward);
  if (config.has_experts(layer))
    inner = static_cast<double>(config.experts.per_token * config.experts.feed_forward +
                                config.experts.shared_feed_forward);
  return hidden * (heads + 3 * inner);
}

// Which stage of `layers` has it, by its Hugging Face name: of a tied embedding the first and the last.
std::vector<int> stages_with(const std::string& name, const DecoderConfig& config,
                             const std::vector<StageLayers>& layers) {
  const int last = static_cast<int>(layers.size()) - 1;
  const std::string prefix = "model.layers.";
  if (!name.starts_with(prefix)) {
    if (name != "model.embed_tokens.weight") return {last};  // the norm, the output
    return config.tied_output && last > 0 ? std::vector<int>{0, last} : std::vector<int>{0};
  }
  std::int64_t layer = 0;
  std::from_chars(name.data() + prefix.size(), name.data() + name.size(), layer);
  const auto stage =
      std::ranges::find_if(layers, [&](const StageLayers& own) { return layer < own.begin + own.count; });
  return {static_cast<int>(stage - layers.begin())};
}

}  // namespace

std::vector<StageLayers> stage_layers(const DecoderConfig& config, int stages) {
  std::vector<double> costs;
  for (std::int64_t layer = 0; layer < config.layers; ++layer) costs.push_back(cost_of_layer(config, layer));
  return assign_layers(costs, stages, static_cast<double>(config.hidden * config.vocabulary));
}

Layout::Named stage_placements(DecoderLM& model, const Grid& grid, const std::vector<int>& rank_of_stage,
                               Layout::Named others) {
  if (others.empty()) others = whole_placements(model.named(), grid);
  if (!grid.has(kStageAxis) || grid.size({kStageAxis}) == 1) return others;
  const auto layers = stage_layers(model.config(), static_cast<int>(rank_of_stage.size()));
  for (auto& [name, placement] : others) {
    std::set<int> on;
    for (const int stage : stages_with(name, model.config(), layers))
      on.insert(rank_of_stage[static_cast<std::size_t>(stage)]);
    if (on.size() == 2) placement.summed.insert(kStageAxis);  // parts of a tied embedding's gradient
    placement.stages = {on.begin(), on.end()};
  }
  return others;
}

Layout split_decoder(DecoderLM& model, const Mesh& mesh, const std::shared_ptr<Pipeline>& pipeline,
                     Layout::Named others) {
  std::vector<int> rank_of_stage;
  for (int stage = 0; stage < pipeline->stages(); ++stage) rank_of_stage.push_back(pipeline->rank_of(stage));
  Layout layout(mesh, stage_placements(model, mesh.grid(), rank_of_stage, std::move(others)));
  if (pipeline->stages() == 1) return layout;
  const at::NoGradGuard no_grad;
  at::Tensor held;  // any one: where it lies is where the stage computes
  for (auto [name, tensor] : model.named())
    if (layout.parameter(name).held)
      held = tensor;
    else
      tensor.set_data(at::empty({0}, tensor.options()));
  StageHooks& hooks = model.hooks().pipeline;
  hooks.stages = [pipeline, layers = stage_layers(model.config(), pipeline->stages())] {
    std::vector<StageHooks::Stage> stages;
    for (const int stage : pipeline->in_step() ? std::vector{pipeline->stage()} : pipeline->own_stages()) {
      const StageLayers& own = layers[static_cast<std::size_t>(stage)];
      stages.push_back({.index = stage,
                        .begin = own.begin,
                        .count = own.count,
                        .is_first = stage == 0,
                        .is_last = stage + 1 == pipeline->stages()});
    }
    return stages;
  };
  const auto turn_to = [pipeline](const StageHooks::Stage& stage) {
    if (!pipeline->in_step()) pipeline->look_at(stage.index);
  };
  hooks.receive = [pipeline, turn_to, held, hidden = model.config().hidden](const StageHooks::Stage& stage) {
    turn_to(stage);
    return pipeline->receive({-1, hidden}).to(held.device());
  };
  hooks.pass_on = [pipeline, turn_to](const StageHooks::Stage& stage, const at::Tensor& stream) {
    turn_to(stage);
    return pipeline->pass_on(stream);
  };
  hooks.of_last_stage = [stages = mesh.along({kStageAxis}, "text"),
                         last = pipeline->rank_of(pipeline->stages() - 1)](const at::Tensor& tensor) {
    Group(stages).broadcast(tensor, last);
    return tensor;
  };
  return layout;
}

}  // namespace isograd
