// Parts of a rank's memory from the lists of kept tensors, and by a formula for other programs.
#include "plan/memory.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <map>
#include <string>
#include <string_view>
#include <tuple>

#include "model/kept_tensors.hpp"
#include "train/build.hpp"

namespace isograd::planner {
namespace {

const std::int64_t kFirstBucket = RunConfig{}.parallel.first_bucket_bytes;

}  // namespace

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
    of.passing = bytes.output_passing, of.passing_weights = bytes.output_passing_weights;
    gone = halves ? output - bytes.output_halves : output;
    if (candidate.strategy == Strategy::kZero3) stays = table;  // the gradient of the root's weight
  }
  for (const std::size_t kind : {0, 1}) {
    if ((kind == 1 ? mixed : dense) == 0) continue;
    of.passing = std::max(of.passing, bytes.passing[kind] + (halves ? 0 : stays) - gone);
    of.passing_weights = std::max(of.passing_weights, bytes.passing_weights[kind] + stays);
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
  const std::vector<int> own = stages_of_rank(candidate, rank);
  const auto shape_of = [&](int stage) -> const StageShape& { return all[std::size_t(stage)]; };
  if (candidate.pp == 1) {
    const OfStage of = of_stage(candidate, all[0], bytes);
    parts.activations = of.kept - of.logits, parts.logits = of.logits, parts.passing = of.passing;
  } else {
    const std::vector<double> nothing(all.size());
    std::vector<double> kept_by(nothing), halves(nothing), passing(nothing), weights(nothing),
        logits(nothing);
    for (const int stage : own) {
      const OfStage of = of_stage(candidate, shape_of(stage), bytes);
      const auto at = std::size_t(stage);
      kept_by[at] = of.kept, halves[at] = of.halves, logits[at] = of.logits;
      passing[at] = of.passing, weights[at] = of.passing_weights;
      parts.passing = std::max({parts.passing, of.passing, of.passing_weights});
    }
    const double most = pipelines_.most_kept(candidate, rank, kept_by, halves, passing, weights);
    if (shape_of(own.back()).outputs || shape_of(own.front()).outputs)
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
  for (const int stage : own) {
    const StageShape& shape = shape_of(stage);
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
    // bucket of a backward is smaller than the others (parallel.first_bucket_bytes).
    const std::int64_t of_first = kFirstBucket / plan.bytes.gradient, sum = blocks + root,
                       least = std::max(root, blocks / std::max<std::int64_t>(1, layers) / 4);
    const std::int64_t in_bucket =
        plan.stage == 3 ? largest
                        : std::min(sum > of_first ? sum - of_first : sum,
                                   std::max(candidate.bucket_bytes / plan.bytes.gradient, least));
    parts.buffers += double((2 * in_bucket + (plan.stage == 3 ? root : 0)) * plan.bytes.gradient);
  }
  return parts;
}

// bf16 weights, fp32 gradients and the bf16 ones of backward, fp32 masters and Adam's states; 1F1B; logits in
// fp32 and, from the second micro-batch on, their gradient (nanotron's source; the constants and the errors
// are in docs/planning.md). Without a pipeline some runs keep the gathered inputs of column-parallel products
// and some gather them again: they are counted where there is memory for them.
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
