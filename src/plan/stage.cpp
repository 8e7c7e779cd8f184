// Layers and elements of stages. Elements are those of the first rank along tp and ep: even_cut() gives it
// the larger part of everything.
#include <algorithm>

#include "model/kept_tensors.hpp"
#include "plan/memory.hpp"
#include "plan/space.hpp"
#include "train/build.hpp"

namespace isograd::planner {
namespace {

// How nanotron gives layers to stages (its source, and what memory and time of its published rows agree
// with).
std::vector<StageShape> stages_of_others(const ModelShape& model, int tp, int stages) {
  const auto hidden = double(model.hidden), width = double(model.feed_forward);
  const double layer = 4 * hidden * hidden + 3 * hidden * width, table = double(model.vocabulary) * hidden,
               head = table / layer;
  std::int64_t last = model.layers, first = std::max(1, stages - 1);
  double least = 1e300;
  for (std::int64_t count = 0; stages > 1 && count <= model.layers; ++count) {
    const double largest = std::max(double(most_of(model.layers - count, first)), double(count) + head);
    if (largest <= least) least = largest, last = count;
  }
  std::vector<StageShape> shapes;
  for (int stage = 0; stage < stages; ++stage) {
    StageShape shape{.embeds = stage == 0, .outputs = stage + 1 == stages};
    const std::int64_t rest = model.layers - last;
    shape.layers = shape.outputs ? last : rest / first + (stage < rest % first ? 1 : 0);
    const bool once = stages == 1 && model.tied_output;
    const double tables = once ? 1 : (shape.embeds ? 1 : 0) + (shape.outputs ? 1 : 0);
    shape.elements = std::int64_t((double(shape.layers) * (layer + 2 * hidden) + table * tables) / tp);
    shapes.push_back(shape);
  }
  return shapes;
}

}  // namespace

// Along tp as rules_of() of parallel/tensor/cut.cpp cuts it.
LayerElements elements_of(const ModelShape& model, std::int64_t key_heads, std::int64_t tp, bool mixture) {
  const double hidden = double(model.hidden), queries = double(most_of(model.heads, tp) * model.head_dim),
               keys = double(key_heads * model.head_dim);
  const auto matrices = [&](std::int64_t width) {
    return (model.gated ? 3 : 2) * hidden * double(most_of(width, tp));
  };
  LayerElements of{.rest = 2 * hidden * (queries + keys) + 2 * hidden};  // q, k, v and o, and two norms
  if (model.attention_bias) of.rest += queries + 2 * keys;
  if (model.output_bias) of.rest += hidden;
  if (model.query_key_norm) of.rest += 2 * double(model.head_dim);
  if (!mixture) {
    of.rest += matrices(model.feed_forward);
    if (model.mlp_bias) of.rest += hidden + (model.gated ? 2 : 1) * double(most_of(model.feed_forward, tp));
    return of;
  }
  const ModelShape::Experts& experts = model.experts;
  of.rest += hidden * double(experts.count) + matrices(experts.shared_feed_forward);
  if (experts.shared_feed_forward > 0 && model.family == "qwen2_moe") of.rest += hidden;  // its switch
  of.expert = matrices(experts.feed_forward);
  return of;
}

std::vector<StageShape> stage_shapes(const Problem& problem, int tp, int ep, int stages) {
  const ModelShape& model = problem.model;
  if (problem.program != Program::kIsograd) return stages_of_others(model, tp, stages);
  const DecoderConfig config = decoder_of(model);
  const std::int64_t key_heads = key_heads_of(config, tp).kept;
  const std::int64_t table = most_of(model.vocabulary, tp) * model.hidden;
  std::vector<StageShape> shapes;
  for (const StageLayers& own : stage_layers(config, stages)) {
    StageShape shape{
        .layers = own.count, .embeds = shapes.empty(), .outputs = int(shapes.size()) + 1 == stages};
    const bool shares = shape.embeds && model.tied_output;  // one table is both
    shape.root = (shape.embeds ? table : 0) + (shape.outputs ? model.hidden + (shares ? 0 : table) : 0);
    shape.elements = shape.root;
    for (std::int64_t layer = own.begin; layer < own.begin + own.count; ++layer) {
      const bool mixture = model.has_experts(layer);
      const LayerElements of = elements_of(model, key_heads, tp, mixture);
      const auto rest = std::int64_t(of.rest),
                 experts = most_of(model.experts.count, ep) * std::int64_t(of.expert);
      shape.elements += rest, shape.expert_elements += experts, shape.mixtures += mixture ? 1 : 0;
      shape.largest_block = std::max(shape.largest_block, rest + experts);
    }
    shapes.push_back(shape);
  }
  return shapes;
}

std::vector<int> stages_of_rank(const Candidate& candidate, int rank_of_pipeline) {
  std::vector<int> stages;
  for (int part = 0; part < candidate.stages_per_rank; ++part)
    stages.push_back(int(stage_of(candidate, rank_of_pipeline, part)));
  return stages;
}

DataParallelPlan data_parallel_plan(const Problem& problem, const Candidate& candidate,
                                    const std::vector<StageShape>& stages, int rank_of_pipeline) {
  ElementBytes bytes = element_bytes(type_of(problem.work.precision), problem.work.states);
  if (bytes.parameter == 2 && !problem.work.fp32_gradients) bytes.gradient = 2;
  DataParallelPlan plan = make_plan(numbers_of(candidate, problem.work), bytes);
  plan.micro_batches = candidate.micro_batches;
  std::int64_t rest = 0, experts = 0, root = 0;
  bool has_table = false;
  for (const int stage : stages_of_rank(candidate, rank_of_pipeline)) {
    const StageShape& shape = stages[std::size_t(stage)];
    rest += shape.elements, experts += shape.expert_elements, root += shape.root;
    if (has_table && shape.outputs &&
        problem.model.tied_output) {  // the first and the last stage, under zb-v
      const std::int64_t table = shape.root - problem.model.hidden;
      rest -= table, root -= table;
    }
    has_table |= shape.embeds;
  }
  // The root stays whole from forward to the end of backward (docs/memory.md), and all else too where blocks
  // are not freed in between.
  const bool stays = candidate.strategy == Strategy::kZero3 && !candidate.reshard;
  const bool apart = plan.elements.size() > 1;
  plan.elements[0].numel = rest + (apart ? 0 : experts);
  plan.elements[0].whole = candidate.strategy != Strategy::kZero3 ? 0 : stays ? plan.elements[0].numel : root;
  if (apart) plan.elements[1].numel = experts, plan.elements[1].whole = stays ? experts : 0;
  return plan;
}

}  // namespace isograd::planner
