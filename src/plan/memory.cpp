// Layers and elements of stages, on the first rank along tp and ep: even_cut() gives it the larger part of
// everything. Parts of a rank's memory from the lists of kept tensors, and by a formula for other programs.
#include "plan/memory.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <string>
#include <string_view>

#include "model/kept_tensors.hpp"
#include "plan/search.hpp"
#include "train/build.hpp"

namespace isograd::planner {
namespace {

const std::int64_t kFirstBucket = RunConfig{}.parallel.first_bucket_bytes;

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
LayerElements elements_of(const ModelShape& model, std::int64_t key_value_heads, std::int64_t tp,
                          bool mixture) {
  const double hidden = double(model.hidden), queries = double(most_of(model.heads, tp) * model.head_dim),
               keys = double(key_value_heads * model.head_dim);
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
  const std::int64_t key_value_heads = key_heads_of(config, tp).kept;
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
      const LayerElements of = elements_of(model, key_value_heads, tp, mixture);
      const auto rest = std::int64_t(of.rest),
                 experts = most_of(model.experts.count, ep) * std::int64_t(of.expert);
      shape.elements += rest, shape.expert_elements += experts, shape.mixtures += mixture ? 1 : 0;
      shape.largest_block = std::max(shape.largest_block, rest + experts);
    }
    shapes.push_back(shape);
  }
  return shapes;
}

DataParallelPlan data_parallel_plan(const Problem& problem, const Candidate& candidate,
                                    const std::vector<StageShape>& stages, int rank_of_pipeline) {
  ElementBytes bytes = element_bytes(type_of(problem.work.precision), problem.work.states);
  if (bytes.parameter == 2 && !problem.work.fp32_gradients) bytes.gradient = 2;
  DataParallelPlan plan = make_plan(numbers_of(candidate, problem.work), bytes);
  plan.micro_batches = candidate.micro_batches;
  std::int64_t rest = 0, experts = 0, root = 0;
  bool has_table = false;
  for (const std::size_t stage : stages_of_rank(candidate, rank_of_pipeline)) {
    const StageShape& shape = stages[stage];
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

const std::vector<StageShape>& MemoryModel::stages(const Candidate& candidate) {
  const std::tuple key{candidate.tp, candidate.ep, candidate.pp * candidate.stages_per_rank};
  if (last_shapes_ && last_key_ == key) return *last_shapes_;
  auto& found = shapes_[key];
  if (found.empty()) found = stage_shapes(problem_, candidate.tp, candidate.ep, std::get<2>(key));
  last_key_ = key, last_shapes_ = &found;
  return found;
}

const MemoryModel::MicroBatch& MemoryModel::micro_batch(const Candidate& candidate) {
  using Gradients = KeptShape::Gradients;
  const bool halves = has_halves(candidate.schedule);
  const KeptShape shape{.tokens = tokens_of(problem_.work, candidate),
                        .element = std::max<std::int64_t>(2, std::int64_t(bytes_of(problem_.work.precision))),
                        .tp = candidate.tp,
                        .cp_ulysses = candidate.cp_ulysses,
                        .ep = candidate.ep,
                        .sequence_parallel = candidate.sequence_parallel,
                        .context_parallel = candidate.cp_ring * candidate.cp_ulysses > 1,
                        .checkpoint = candidate.checkpoint,
                        .on_gpu = !problem_.cluster.host_memory,
                        .gradients = candidate.strategy == Strategy::kZero3 ? Gradients::kOfUnits
                                     : candidate.strategy == Strategy::kZero2 && !candidate.reduce_once
                                         ? Gradients::kPassing
                                         : Gradients::kInPlace,
                        .half = halves ? KeptShape::Half::kInputs : KeptShape::Half::kWhole};
  const auto [found, is_new] = micro_batches_.try_emplace(
      {shape.tp, shape.ep, shape.tokens, shape.cp_ulysses, shape.context_parallel, shape.sequence_parallel,
       8 * halves + 4 * shape.checkpoint + int(shape.gradients)});
  MicroBatch& bytes = found->second;
  if (!is_new) return bytes;
  KeptShape of_weights = shape;
  of_weights.half = KeptShape::Half::kWeights;
  for (std::int64_t layer = 0; layer < config_.layers; ++layer) {
    const std::size_t kind = config_.has_experts(layer) ? 1 : 0;
    if (bytes.kept[kind] > 0) continue;
    bytes.kept[kind] = double(total(kept_by_block(config_, layer, shape)));
    bytes.halves[kind] = double(kept_between_halves(config_, layer, shape));
    bytes.passing[kind] = double(in_passing(config_, layer, shape));
    bytes.passing_weights[kind] = double(in_passing(config_, layer, of_weights));
  }
  const bool fused = fuses_loss(RunConfig{}, shape.tokens, config_.vocabulary, std::size_t(shape.element));
  for (const KeptTensor& tensor : kept_by_output(config_, shape, fused))
    (std::string_view(tensor.name) == "loss: logits" ? bytes.logits : bytes.output) += double(tensor.bytes);
  bytes.output_halves = double(kept_between_halves_by_output(config_, shape, fused));
  bytes.output_passing = double(in_passing_of_output(config_, shape, fused));
  bytes.output_passing_weights = double(in_passing_of_output(config_, of_weights, fused));
  bytes.pass = double(total(kept_by_pass(config_, shape)));
  bytes.stream = double(shape.tokens * config_.hidden * shape.element) /
                 (shape.sequence_parallel ? double(shape.tp) : 1);
  return bytes;
}

MemoryModel::OfStage MemoryModel::of_stage(const Candidate& candidate, const StageShape& shape,
                                           const MicroBatch& bytes) const {
  const double mixed = double(shape.mixtures), dense = double(shape.layers - shape.mixtures);
  const double table = double(most_of(config_.vocabulary, candidate.tp) * config_.hidden) *
                       std::max(2.0, bytes_of(problem_.work.precision));
  const double output = bytes.output + bytes.logits;
  OfStage of{
      .kept = mixed * bytes.kept[1] + dense * bytes.kept[0] + bytes.pass + (shape.outputs ? output : 0),
      .halves = mixed * bytes.halves[1] + dense * bytes.halves[0] +
                (shape.outputs ? bytes.output_halves : 0) + (shape.embeds ? bytes.stream : 0),
      .logits = shape.outputs ? bytes.logits : 0};
  const bool halves = has_halves(candidate.schedule);
  double stays = 0, gone = 0;
  if (shape.outputs) {
    of.passing = bytes.output_passing;
    if (halves) of.passing_weights = bytes.output_passing_weights;
    gone = halves ? output - bytes.output_halves : output;
    if (candidate.strategy == Strategy::kZero3) stays = table;  // the gradient of the root's weight
  }
  for (const std::size_t kind : {0, 1}) {
    if ((kind == 1 ? mixed : dense) == 0) continue;
    of.passing = std::max(of.passing, bytes.passing[kind] + (halves ? 0 : stays) - gone);
    if (halves) of.passing_weights = std::max(of.passing_weights, bytes.passing_weights[kind] + stays);
  }
  // All else of the micro-batch is gone by then.
  const double of_table = table + stays + bytes.stream - (halves ? of.halves : of.kept);
  if (shape.embeds)
    (halves ? of.passing_weights : of.passing) = std::max(halves ? of.passing_weights : of.passing, of_table);
  return of;
}

// The same stages as the rank before, which has as many micro-batches in flight, or more.
bool MemoryModel::is_like_before(const Candidate& candidate, int rank) {
  const std::vector<StageShape>& all = stages(candidate);
  for (int part = 0; part < candidate.stages_per_rank; ++part)
    if (all[stage_of(candidate, rank, part)] != all[stage_of(candidate, rank - 1, part)]) return false;
  return true;
}

MemoryParts MemoryModel::isograds(const Candidate& candidate, int rank) {
  const std::vector<StageShape>& all = stages(candidate);
  const DataParallelPlan plan = data_parallel_plan(problem_, candidate, all, rank);
  const PersistentBytes kept = persistent_bytes(plan);
  MemoryParts parts{.parameters = double(kept.parameters),
                    .gradients = double(kept.gradients),
                    .masters = double(kept.master),
                    .states = double(kept.state),
                    .reserve = problem_.cluster.reserve,
                    .rank_of_pipeline = rank};
  const MicroBatch& bytes = micro_batch(candidate);
  const auto own = stages_of_rank(candidate, rank);
  if (candidate.pp == 1) {
    const OfStage of = of_stage(candidate, all[0], bytes);
    parts.activations = of.kept - of.logits, parts.logits = of.logits, parts.passing = of.passing;
  } else {
    const std::vector<double> nothing(all.size());
    std::vector<double> kept_by(nothing), halves(nothing), passing(nothing), weights(nothing),
        logits(nothing);
    for (const std::size_t at : own) {
      const OfStage of = of_stage(candidate, all[at], bytes);
      kept_by[at] = of.kept, halves[at] = of.halves, logits[at] = of.logits;
      passing[at] = of.passing, weights[at] = of.passing_weights;
      parts.passing = std::max({parts.passing, of.passing, of.passing_weights});
    }
    const double most = pipelines_.most_kept(candidate, rank, kept_by, halves, passing, weights);
    if (all[own.back()].outputs || all[own.front()].outputs)
      parts.logits = pipelines_.most_kept(candidate, rank, logits, logits, nothing, nothing);
    parts.passing = std::min(parts.passing, most - parts.logits);
    parts.activations = std::max(0.0, most - parts.logits - parts.passing);
    parts.buffers += 2 * bytes.stream;  // what comes from a neighbour and what leaves for one
  }
  // Tables of the rotary embedding, of a power of two positions (RotaryTable::at()).
  parts.buffers +=
      double(std::int64_t(std::bit_ceil(static_cast<std::uint64_t>(problem_.work.sequence + 1))) *
             config_.head_dim) *
      std::max(4.0, bytes_of(problem_.work.precision));
  std::int64_t largest = 0, blocks = 0, root = 0, layers = 0;
  for (const std::size_t stage : own) {
    const StageShape& shape = all[stage];
    largest = std::max(largest, shape.largest_block), root += shape.root, layers += shape.layers;
    blocks += shape.elements + shape.expert_elements - shape.root;
  }
  const bool travels = plan.elements[0].shards > 1 || plan.elements.back().shards > 1;
  if (candidate.strategy == Strategy::kZero3 && travels && !candidate.share_parameters)
    // The root, which stays whole, and the two largest blocks: the second is gathered ahead (gather_bound()).
    parts.gathered =
        double((root + (candidate.reshard ? std::min(blocks, 2 * largest) : blocks)) * plan.bytes.parameter);
  if (plan.stage >= 2 && travels && !candidate.reduce_once) {
    // Buckets of stage 2 take turns with two buffers, units of stage 3 too; the root has one. The first
    // bucket of a backward (parallel.first_bucket_bytes) is smaller than the others, unless little is left.
    const std::int64_t of_first = kFirstBucket / plan.bytes.gradient, sum = blocks + root,
                       least = std::max(root, blocks / std::max<std::int64_t>(1, layers) / 4);
    const std::int64_t in_bucket =
        plan.stage == 3 ? largest
                        : std::min(sum > of_first ? std::max(of_first, sum - of_first) : sum,
                                   std::max(candidate.bucket_bytes / plan.bytes.gradient, least));
    parts.buffers += double((2 * in_bucket + (plan.stage == 3 ? root : 0)) * plan.bytes.gradient);
  }
  return parts;
}

// bf16 weights, fp32 gradients and the bf16 ones of backward, fp32 masters and Adam's states; 1F1B; logits in
// fp32 and, from the second micro-batch on, their gradient (nanotron's source; the constants and the errors
// are in docs/planning_reference.md). Without a pipeline some runs keep the gathered inputs of
// column-parallel products and some gather them again: they are counted where there is memory for them.
MemoryParts MemoryModel::others(const Candidate& candidate, int stage) {
  const StageShape& shape = stages(candidate)[std::size_t(stage)];
  const auto shards = double(candidate.data_ranks());
  const auto over = [&](int from) { return int(candidate.strategy) >= from ? shards : 1; };
  const double elements = double(shape.elements), rows = double(tokens_of(problem_.work, candidate)),
               hidden = double(config_.hidden), tp = candidate.tp;
  const double layer = rows *
                       (problem_.constants.by_hidden * hidden +
                        problem_.constants.by_feed_forward * double(config_.feed_forward)) /
                       tp;
  const auto in_flight =
      double(std::min<std::int64_t>(candidate.micro_batches, candidate.pp - stage)) * double(shape.layers);
  constexpr double kLogit = 4;
  MemoryParts parts{.parameters = 2 * elements / over(3),
                    .gradients = (4 + 2) * elements / over(2),
                    .masters = 4 * elements / over(1),
                    .states = 8 * elements / over(1),
                    .activations = in_flight * layer,
                    .passing = shape.layers > 0 ? 2 * layer : 0,
                    .reserve = problem_.cluster.reserve,
                    .rank_of_pipeline = stage};
  if (shape.outputs)
    parts.logits = kLogit * (candidate.micro_batches > 1 ? 2 : 1) * rows * double(config_.vocabulary) / tp;
  if (candidate.pp == 1) {
    const double inputs = 4 * hidden * rows * in_flight * (1 - 1 / tp);
    constexpr double kNearlyFull = 0.9;
    if (parts.total() + inputs < kNearlyFull * problem_.cluster.device.memory) parts.gathered = inputs;
  }
  return parts;
}

MemoryParts MemoryModel::of_rank(const Candidate& candidate, int rank_of_pipeline) {
  return problem_.program == Program::kIsograd ? isograds(candidate, rank_of_pipeline)
                                               : others(candidate, rank_of_pipeline);
}

MemoryParts MemoryModel::of(const Candidate& candidate) {
  MemoryParts most;
  for (int rank = 0; rank < candidate.pp; ++rank) {
    if (rank > 0 && is_like_before(candidate, rank)) continue;
    const MemoryParts parts = of_rank(candidate, rank);
    if (rank == 0 || parts.total() > most.total()) most = parts;
  }
  return most;
}

double MemoryModel::kept(const Candidate& candidate) {
  if (problem_.program != Program::kIsograd) return of(candidate).kept();
  return double(persistent_bytes(data_parallel_plan(problem_, candidate, stages(candidate), 0)).total());
}

// With one micro-batch, and without the output: a fused loss keeps less of more tokens.
double MemoryModel::least_beyond_kept(const Candidate& candidate) {
  if (problem_.program != Program::kIsograd) {
    const MemoryParts parts = of(candidate);
    return parts.total() - parts.kept();
  }
  StageShape first = stages(candidate)[0];
  first.outputs = false;
  return of_stage(candidate, first, micro_batch(candidate)).kept + problem_.cluster.reserve;
}

std::vector<Planned::Part> MemoryModel::explain(const Candidate& candidate, const MemoryParts& parts) {
  std::vector<Planned::Part> lines;
  const bool own = problem_.program == Program::kIsograd;
  const auto add = [&](const char* name, std::string formula, double value, Origin origin) {
    if (value <= 0) return;
    const double width =
        origin == Origin::kExact ? 0 : widths_of(problem_.program, origin, config_.experts.count > 0).memory;
    lines.push_back({name, std::move(formula), within(value, width, origin)});
  };
  const Origin counted = own ? Origin::kExact : Origin::kFitted;
  std::string kept = "bytes of an element times elements";
  if (own) {
    const DataParallelPlan plan =
        data_parallel_plan(problem_, candidate, stages(candidate), parts.rank_of_pipeline);
    kept = fmt::format("part of {}, with Ψ = {:.4g}, N = {}", persistent_formula(plan),
                       double(plan.elements[0].numel), plan.elements[0].shards);
  }
  add("parameters", kept, parts.parameters, counted);
  add("gradients", kept, parts.gradients, counted);
  add("masters", kept, parts.masters, counted);
  add("states", kept, parts.states, counted);
  add("activations",
      fmt::format("tensors that backward reads, of {} tokens", tokens_of(problem_.work, candidate)),
      parts.activations, counted);
  add("logits", "tokens times vocabulary", parts.logits, counted);
  add("gathered",
      own ? "the root, and two blocks of zero3" : "inputs of column-parallel products, of all tokens",
      parts.gathered, counted);
  add("buffers", "of buckets and of messages", parts.buffers, Origin::kAssumed);
  add("in passing", "the largest backward's own tensors", parts.passing, own ? Origin::kAssumed : counted);
  add("reserve", "of the cluster", parts.reserve, Origin::kAssumed);
  return lines;
}

}  // namespace isograd::planner
