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

// Bytes of a micro-batch: of a block without and with experts, of what a stage has once, of the output.
struct MicroBatchBytes {
  std::array<double, 2> kept{}, halves{}, passing{};
  double pass = 0, stream = 0, output = 0, logits = 0, output_passing = 0;
};

double as_double(std::int64_t bytes) { return double(bytes); }

}  // namespace

struct MemoryModel::Impl {
  Impl(const Problem& of, Pipelines& with) : problem(of), pipelines(with), config(decoder_of(of.model)) {}

  const Problem& problem;
  Pipelines& pipelines;
  const DecoderConfig config;
  std::map<std::tuple<int, int, int>, std::vector<StageShape>> shapes{};
  std::tuple<int, int, int> last_key{};
  const std::vector<StageShape>* last_shapes = nullptr;
  std::map<std::array<std::int64_t, 7>, MicroBatchBytes> of_micro_batch{};

  const std::vector<StageShape>& stages(const Candidate& candidate) {
    const std::tuple key{candidate.tp, candidate.ep, candidate.pp * candidate.stages_per_rank};
    if (last_shapes && last_key == key) return *last_shapes;  // candidates of a mesh come together
    auto& found = shapes[key];
    if (found.empty()) found = stage_shapes(problem, candidate.tp, candidate.ep, std::get<2>(key));
    last_key = key, last_shapes = &found;
    return found;
  }

  std::int64_t tokens(const Candidate& candidate) const {
    const std::int64_t cp = std::int64_t{candidate.cp_ring} * candidate.cp_ulysses;
    return (candidate.micro_batch * problem.work.sequence + cp - 1) / cp;
  }

  const MicroBatchBytes& micro_batch(const Candidate& candidate) {
    using Gradients = KeptShape::Gradients;
    const Gradients gradients = candidate.strategy == Strategy::kZero3 ? Gradients::kOfUnits
                                : candidate.strategy == Strategy::kZero2 && !candidate.reduce_once
                                    ? Gradients::kPassing
                                    : Gradients::kInPlace;
    const auto [found, is_new] = of_micro_batch.try_emplace(
        {candidate.tp, candidate.ep, tokens(candidate), candidate.cp_ulysses,
         std::int64_t{candidate.cp_ring} * candidate.cp_ulysses > 1 ? 1 : 0,
         candidate.sequence_parallel ? 1 : 0, (candidate.checkpoint ? 4 : 0) + int(gradients)});
    MicroBatchBytes& bytes = found->second;
    if (!is_new) return bytes;
    const std::int64_t element = std::max<std::int64_t>(2, std::int64_t(bytes_of(problem.work.precision)));
    const KeptShape shape{.tokens = tokens(candidate),
                          .element = element,
                          .tp = candidate.tp,
                          .cp_ulysses = candidate.cp_ulysses,
                          .ep = candidate.ep,
                          .sequence_parallel = candidate.sequence_parallel,
                          .context_parallel = candidate.cp_ring * candidate.cp_ulysses > 1,
                          .checkpoint = candidate.checkpoint,
                          .on_gpu = !problem.cluster.host_memory,
                          .gradients = gradients};
    for (std::int64_t layer = 0; layer < config.layers; ++layer) {
      const std::size_t kind = config.has_experts(layer) ? 1 : 0;
      if (bytes.kept[kind] > 0) continue;
      bytes.kept[kind] = as_double(total(kept_by_block(config, layer, shape)));
      bytes.halves[kind] = as_double(kept_between_halves(config, layer, shape));
      bytes.passing[kind] = as_double(in_passing(config, layer, shape));
    }
    const bool fused = fuses_loss(RunConfig{}, shape.tokens, config.vocabulary, std::size_t(element));
    for (const KeptTensor& tensor : kept_by_output(config, shape, fused))
      (std::string_view(tensor.name) == "loss: logits" ? bytes.logits : bytes.output) +=
          as_double(tensor.bytes);
    bytes.output_passing = as_double(in_passing_of_output(config, shape, fused));
    bytes.pass = as_double(total(kept_by_pass(config, shape)));
    bytes.stream =
        as_double(shape.tokens * config.hidden * element) / (candidate.sequence_parallel ? candidate.tp : 1);
    return bytes;
  }

  // Kept by a micro-batch of a stage, and what passes in the backward of its fullest moment: the output's, or
  // a block's when the output's tensors are gone, or the embedding's gradient at the end.
  struct OfStage {
    double kept = 0, halves = 0, logits = 0, passing = 0;
  };
  OfStage of_stage(const Candidate& candidate, const StageShape& shape, const MicroBatchBytes& bytes) const {
    const std::int64_t mixed = shape.mixtures;
    const double element = bytes_of(problem.work.precision);
    const double table = as_double((config.vocabulary + candidate.tp - 1) / candidate.tp * config.hidden) *
                         std::max(2.0, element);
    OfStage of{.kept = as_double(mixed) * bytes.kept[1] + as_double(shape.layers - mixed) * bytes.kept[0] +
                       bytes.pass + (shape.outputs ? bytes.output + bytes.logits : 0),
               .halves = as_double(mixed) * bytes.halves[1] +
                         as_double(shape.layers - mixed) * bytes.halves[0] +
                         (shape.outputs ? bytes.stream + bytes.logits : 0),
               .logits = shape.outputs ? bytes.logits : 0};
    double stays = 0, gone = 0;
    if (shape.outputs) {
      of.passing = bytes.output_passing;
      gone = bytes.output + bytes.logits;
      if (candidate.strategy == Strategy::kZero3) stays = table;  // the gradient of the root's weight
    }
    for (const std::size_t kind : {std::size_t{0}, std::size_t{1}})
      if ((kind == 1 ? mixed : shape.layers - mixed) > 0)
        of.passing = std::max(of.passing, bytes.passing[kind] + stays - gone);
    if (shape.embeds) of.passing = std::max(of.passing, table + stays + bytes.stream - of.kept);
    return of;
  }

  // The same stages as the rank before, which has as many micro-batches in flight, or more.
  bool is_like_before(const Candidate& candidate, int rank) {
    const std::vector<StageShape>& all = stages(candidate);
    const auto alike = [&](int one, int other) {
      const StageShape &a = all[std::size_t(one)], &b = all[std::size_t(other)];
      return a.layers == b.layers && a.elements == b.elements && a.expert_elements == b.expert_elements &&
             a.mixtures == b.mixtures && a.largest_block == b.largest_block && a.root == b.root &&
             a.embeds == b.embeds && a.outputs == b.outputs;
    };
    if (candidate.schedule == Schedule::kZeroBubbleV &&
        !alike(2 * candidate.pp - 1 - rank, 2 * candidate.pp - rank))
      return false;
    const int parts = candidate.schedule == Schedule::kZeroBubbleV ? 1 : candidate.stages_per_rank;
    for (int part = 0; part < parts; ++part)
      if (!alike(rank + part * candidate.pp, rank - 1 + part * candidate.pp)) return false;
    return true;
  }

  MemoryParts isograds(const Candidate& candidate, int rank);
  MemoryParts others(const Candidate& candidate, int stage);
  double kept_of(const Candidate& candidate, int rank) {
    return as_double(
        persistent_bytes(data_parallel_plan(problem, candidate, stages(candidate), rank)).total());
  }
};

MemoryParts MemoryModel::Impl::isograds(const Candidate& candidate, int rank) {
  const std::vector<StageShape>& all = stages(candidate);
  const DataParallelPlan plan = data_parallel_plan(problem, candidate, all, rank);
  const PersistentBytes kept = persistent_bytes(plan);
  MemoryParts parts{.parameters = as_double(kept.parameters),
                    .gradients = as_double(kept.gradients),
                    .masters = as_double(kept.master),
                    .states = as_double(kept.state),
                    .reserve = problem.cluster.reserve,
                    .rank_of_pipeline = rank};
  const MicroBatchBytes& bytes = micro_batch(candidate);
  const std::vector<int> own = stages_of_rank(candidate, rank);
  const auto shape_of = [&](int stage) -> const StageShape& { return all[std::size_t(stage)]; };
  if (candidate.pp == 1) {
    const OfStage of = of_stage(candidate, all[0], bytes);
    parts.activations = of.kept - of.logits, parts.logits = of.logits, parts.passing = of.passing;
  } else {
    std::vector<double> stage_kept(all.size()), halves(all.size()), passing(all.size()), logits(all.size());
    const std::vector<double> nothing(all.size());
    for (const int stage : own) {
      const OfStage of = of_stage(candidate, shape_of(stage), bytes);
      const auto at = std::size_t(stage);
      stage_kept[at] = of.kept, halves[at] = of.halves;
      logits[at] = of.logits, passing[at] = of.passing;
      parts.passing = std::max(parts.passing, of.passing);
    }
    const double most = pipelines.most_kept(candidate, rank, stage_kept, halves, passing);
    if (shape_of(own.back()).outputs || shape_of(own.front()).outputs)
      parts.logits = pipelines.most_kept(candidate, rank, logits, logits, nothing);
    parts.activations = std::max(0.0, most - parts.logits - parts.passing);
    parts.buffers += 2 * bytes.stream;  // what comes from a neighbour and what leaves for one
  }
  // Tables of the rotary embedding, of a power of two positions (RotaryTable::at()).
  parts.buffers +=
      as_double(std::int64_t(std::bit_ceil(static_cast<std::uint64_t>(problem.work.sequence + 1))) *
                config.head_dim) *
      std::max(4.0, bytes_of(problem.work.precision));
  std::int64_t largest = 0, blocks = 0, root = 0, layers = 0;
  for (const int stage : own) {
    const StageShape& shape = shape_of(stage);
    largest = std::max(largest, shape.largest_block), root += shape.root, layers += shape.layers;
    blocks += shape.elements + shape.expert_elements - shape.root;
  }
  const bool travels = plan.elements[0].shards > 1 || plan.elements.back().shards > 1;
  if (candidate.strategy == Strategy::kZero3 && travels && !candidate.share_parameters)
    // The root, which stays whole, and the two largest blocks: the second is gathered ahead (gather_bound()).
    parts.gathered = as_double((root + (candidate.reshard ? std::min(blocks, 2 * largest) : blocks)) *
                               plan.bytes.parameter);
  if (plan.stage >= 2 && travels && !candidate.reduce_once) {
    // Buckets of stage 2 take turns with two buffers, units of stage 3 too; the root has one. The first
    // bucket of a backward is smaller than the others (parallel.first_bucket_bytes).
    const std::int64_t of_first = kFirstBucket / plan.bytes.gradient, sum = blocks + root,
                       least = std::max(root, blocks / std::max<std::int64_t>(1, layers) / 4);
    const std::int64_t in_bucket =
        plan.stage == 3 ? largest
                        : std::min(sum > of_first ? sum - of_first : sum,
                                   std::max(candidate.bucket_bytes / plan.bytes.gradient, least));
    parts.buffers += as_double((2 * in_bucket + (plan.stage == 3 ? root : 0)) * plan.bytes.gradient);
  }
  return parts;
}

// bf16 weights, fp32 gradients and the bf16 ones of backward, fp32 masters and Adam's states; 1F1B; logits in
// fp32 and, from the second micro-batch on, their gradient (nanotron's source; the constants and the errors
// are in docs/planning.md). Without a pipeline some runs keep the gathered inputs of column-parallel products
// and some gather them again: they are counted where there is memory for them.
MemoryParts MemoryModel::Impl::others(const Candidate& candidate, int stage) {
  const StageShape& shape = stages(candidate)[std::size_t(stage)];
  const auto shards = as_double(candidate.data_ranks());
  const auto over = [&](int from) { return int(candidate.strategy) >= from ? shards : 1; };
  const double elements = as_double(shape.elements), rows = as_double(tokens(candidate)),
               hidden = as_double(config.hidden), tp = candidate.tp;
  const double layer = rows *
                       (problem.constants.by_hidden * hidden +
                        problem.constants.by_feed_forward * as_double(config.feed_forward)) /
                       tp;
  const auto in_flight = as_double(std::min<std::int64_t>(candidate.micro_batches, candidate.pp - stage)) *
                         as_double(shape.layers);
  constexpr double kLogit = 4;
  MemoryParts parts{.parameters = 2 * elements / over(3),
                    .gradients = (4 + 2) * elements / over(2),
                    .masters = 4 * elements / over(1),
                    .states = 8 * elements / over(1),
                    .activations = in_flight * layer,
                    .passing = shape.layers > 0 ? 2 * layer : 0,
                    .reserve = problem.cluster.reserve,
                    .rank_of_pipeline = stage};
  if (shape.outputs)
    parts.logits = kLogit * (candidate.micro_batches > 1 ? 2 : 1) * rows * as_double(config.vocabulary) / tp;
  if (candidate.pp == 1) {
    const double inputs = 4 * hidden * rows * in_flight * (1 - 1 / tp);
    constexpr double kNearlyFull = 0.9;
    if (parts.total() + inputs < kNearlyFull * problem.cluster.device.memory) parts.gathered = inputs;
  }
  return parts;
}

MemoryModel::MemoryModel(const Problem& problem, Pipelines& pipelines)
    : impl_(std::make_unique<Impl>(problem, pipelines)) {}
MemoryModel::~MemoryModel() = default;

const std::vector<StageShape>& MemoryModel::stages(const Candidate& candidate) {
  return impl_->stages(candidate);
}

MemoryParts MemoryModel::of_rank(const Candidate& candidate, int rank_of_pipeline) {
  return impl_->problem.program == Program::kIsograd ? impl_->isograds(candidate, rank_of_pipeline)
                                                     : impl_->others(candidate, rank_of_pipeline);
}

MemoryParts MemoryModel::of(const Candidate& candidate) {
  MemoryParts most;
  for (int rank = 0; rank < candidate.pp; ++rank) {
    if (rank > 0 && impl_->is_like_before(candidate, rank)) continue;
    const MemoryParts parts = of_rank(candidate, rank);
    if (rank == 0 || parts.total() > most.total()) most = parts;
  }
  return most;
}

double MemoryModel::kept(const Candidate& candidate) {
  if (impl_->problem.program != Program::kIsograd) return of(candidate).kept();
  return impl_->kept_of(candidate, 0);
}

// With one micro-batch, and without the output: a fused loss keeps less of more tokens.
double MemoryModel::least_beyond_kept(const Candidate& candidate) {
  if (impl_->problem.program != Program::kIsograd) {
    const MemoryParts parts = of(candidate);
    return parts.total() - parts.kept();
  }
  StageShape first = impl_->stages(candidate)[0];
  first.outputs = false;
  return impl_->of_stage(candidate, first, impl_->micro_batch(candidate)).kept +
         impl_->problem.cluster.reserve;
}

std::vector<Planned::Part> MemoryModel::explain(const Candidate& candidate, const MemoryParts& parts) {
  std::vector<Planned::Part> lines;
  const bool own = impl_->problem.program == Program::kIsograd;
  const auto add = [&](const char* name, std::string formula, double value, Origin origin) {
    if (value <= 0) return;
    const Widths widths = widths_of(impl_->problem.program, origin, impl_->config.experts.count > 0);
    const double width = origin == Origin::kExact ? 0 : widths.memory;
    lines.push_back(
        {.name = name,
         .formula = std::move(formula),
         .number = {
             .value = value, .low = value * (1 - width), .high = value * (1 + width), .origin = origin}});
  };
  const Origin counted = own ? Origin::kExact : Origin::kFitted;
  std::string kept = "bytes of an element times elements";
  if (own) {
    const DataParallelPlan plan =
        data_parallel_plan(impl_->problem, candidate, impl_->stages(candidate), parts.rank_of_pipeline);
    kept = fmt::format("part of {}, with Ψ = {:.4g}, N = {}", persistent_formula(plan),
                       as_double(plan.elements[0].numel), plan.elements[0].shards);
  }
  add("parameters", kept, parts.parameters, counted);
  add("gradients", kept, parts.gradients, counted);
  add("masters", kept, parts.masters, counted);
  add("states", kept, parts.states, counted);
  add("activations", fmt::format("tensors that backward reads, of {} tokens", impl_->tokens(candidate)),
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
