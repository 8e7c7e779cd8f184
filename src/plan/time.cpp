// Seconds of isograd's own steps: a micro-batch of each stage, the pipeline, then gradients and parameters,
// each behind what hides it (README.md, "Time").
#include "plan/time.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace isograd::planner {
namespace {

constexpr std::int64_t kLeastBucket = 1 << 20;
constexpr double kBarelyLess = 1 - 1e-12;  // sums in another order are not above what they bound
// Parts that candidates share. A full table is begun anew, so that memory does not grow with the space.
constexpr std::size_t kMostShapes = 4096;

// A token's, so that long ones count for more.
std::int64_t fragment_length(const Work& work) {
  double tokens = 0, squares = 0;
  for (const std::int64_t document : work.documents) {
    const auto length = double(std::min(document, work.sequence));
    tokens += length, squares += length * length;
  }
  return tokens > 0 ? std::int64_t(squares / tokens) : work.sequence;
}

}  // namespace

StepModel::StepModel(const Problem& problem, Pipelines& pipelines, MemoryModel& memory)
    : problem_(problem),
      pipelines_(pipelines),
      memory_(memory),
      network_(problem.cluster, problem.calibration, problem.constants.share_inside,
               problem.constants.share_across),
      rates_(problem),
      overlap_(problem.calibration.overlap.value_or(problem.constants.overlap)),
      pairs_(pairs_by_sequence(problem.work)),
      mean_pairs_(packs_of(pairs_).pairs),
      fragment_(fragment_length(problem.work)) {}

StepModel::Shape StepModel::shape_of(const Candidate& c) {
  return {c.tp, c.cp_ring, c.cp_ulysses, c.ep, c.micro_batch, c.sequence_parallel, c.checkpoint};
}

const StepModel::Passes& StepModel::passes_of(const Candidate& c) {
  if (passes_.size() >= kMostShapes) passes_.clear();
  const auto [found, is_new] = passes_.try_emplace(shape_of(c));
  if (!is_new) return found->second;
  for (std::int64_t layer = 0; layer < problem_.model.layers; ++layer) {
    Pass& kind = problem_.model.has_experts(layer) ? found->second.mixture : found->second.dense;
    if (kind.forward.total() == 0) kind = computed(c, layer);
  }
  found->second.output = computed(c, -1);
  return found->second;
}

// `layer` -1: the output.
StepModel::Pass StepModel::computed(const Candidate& c, std::int64_t layer) const {
  const LayerWork work = layer < 0 ? output_work(problem_, c) : layer_work(problem_, c, layer, mean_pairs_);
  double products = 0;
  for (const Product& product : work.products) products += rates_.seconds(product);
  const auto attention = [&](double flops) {
    return rates_.attention(flops, fragment_, problem_.model.head_dim);
  };
  const auto sent = [&](Operation operation, double bytes, Axis axis) {
    return bytes > 0 ? network_.seconds(operation, bytes, reach_of(c, axis, problem_.cluster)) : 0;
  };
  Pass pass;
  pass.forward = {.products = products,
                  .attention = attention(work.pairs),
                  .memory = rates_.memory(work.bytes) + rates_.copies(work.copies),
                  .overhead = rates_.operators(work.operators)};
  // Attention's backward computes five products for the forward's two; other operators move their inputs
  // and gradients.
  pass.inputs = {.products = products,
                 .attention = attention(2.5 * work.pairs),
                 .memory = rates_.memory(2 * work.bytes) + rates_.copies(2 * work.copies),
                 .overhead = rates_.operators(work.operators)};
  pass.weights = {.products = products, .overhead = rates_.operators(work.operators / 2)};

  // A gather before and a reduce-scatter behind each pair of products, in the forward and in the backward;
  // an all-reduce where the sequence is whole. The output has half.
  const double regions = layer < 0 ? 1 : 2;
  const double tokens = c.sequence_parallel ? sent(Operation::kAllGather, work.tp_bytes, Axis::kTp) +
                                                  sent(Operation::kReduceScatter, work.tp_bytes, Axis::kTp)
                                            : sent(Operation::kAllReduce, work.tp_bytes, Axis::kTp);
  pass.forward.tp = pass.inputs.tp = regions * tokens;
  // A hop of keys and values is hidden behind the block that is computed, and in backward, with gradients,
  // too.
  if (c.cp_ring > 1) {
    const double hop = sent(Operation::kSend, work.ring_bytes, Axis::kRing), hops = c.cp_ring - 1;
    const auto add = [&](Seconds& to, double each) {
      const double shown = hops * exposed(each, to.attention / c.cp_ring, overlap_);
      to.cp += shown, to.hidden_cp += hops * each - shown;
    };
    add(pass.forward, hop), add(pass.inputs, 2 * hop);
  }
  const double heads = sent(Operation::kAllToAll, work.ulysses_bytes, Axis::kUlysses);
  pass.forward.cp += heads, pass.inputs.cp += heads;
  const double experts = 2 * sent(Operation::kAllToAll, work.expert_bytes, Axis::kExpert);  // there and back
  pass.forward.ep = pass.inputs.ep = experts;
  if (c.checkpoint && layer >= 0) pass.inputs.add(pass.forward);
  return pass;
}

const StepModel::Staged& StepModel::staged(const Candidate& c) {
  if (stages_.size() >= kMostShapes) stages_.clear();
  const bool folded = c.schedule == Schedule::kZeroBubbleV;
  const auto [found, is_new] = stages_.try_emplace({shape_of(c), c.pp, c.stages_per_rank, folded});
  Staged& made = found->second;
  if (!is_new) return made;
  const Passes& each = passes_of(c);
  std::vector<Pass> all;
  for (const StageShape& stage : memory_.stages(c)) {
    Pass sum;
    sum.add(each.dense, double(stage.layers - stage.mixtures));
    sum.add(each.mixture, double(stage.mixtures));
    if (stage.outputs) sum.add(each.output);
    all.push_back(sum);
    made.times.forward.push_back(sum.forward.total());
    made.times.backward_inputs.push_back(sum.inputs.total());
    made.times.backward_weights.push_back(sum.weights.total());
  }
  if (c.pp > 1) {
    const double stream = double(c.micro_batch) * double(problem_.work.sequence) *
                          double(problem_.model.hidden) * bytes_of(problem_.work.precision) /
                          (double(c.cp_ring) * c.cp_ulysses);
    Reach next = reach_of(c, Axis::kStage, problem_.cluster);
    next.ranks = 2;
    made.times.transfer = network_.seconds(Operation::kSend, stream / (c.sequence_parallel ? c.tp : 1), next);
  }
  double most = -1;
  for (int rank = 0; rank < c.pp; ++rank) {
    double busy = 0;
    for (const std::size_t stage : stages_of_rank(c, rank))
      busy +=
          made.times.forward[stage] + made.times.backward_inputs[stage] + made.times.backward_weights[stage];
    if (busy > most) most = busy, made.slowest = rank;
  }
  for (const std::size_t stage : stages_of_rank(c, made.slowest)) made.of_slowest.add(all[stage]);
  return made;
}

// No pipeline is shorter: a rank computes all its micro-batches after the first has come through the stages
// before, and where backwards are whole its last one goes back through them.
double StepModel::shortest(const Candidate& c, const StageTimes& times) {
  if (c.pp == 1) return 0;
  const bool halves = has_halves(c.schedule);
  double before = 0, longest = 0;
  for (int rank = 0; rank < c.pp; ++rank) {
    double busy = 0;
    for (const std::size_t stage : stages_of_rank(c, rank))
      busy += times.forward[stage] + times.backward_inputs[stage] + times.backward_weights[stage];
    longest = std::max(longest, before + double(c.micro_batches) * busy);
    const auto at = std::size_t(rank);
    before += times.forward[at] + times.transfer;
    if (!halves) before += times.backward_inputs[at] + times.backward_weights[at] + times.transfer;
  }
  return longest;
}

// `bucket_bytes` 0: no more than with any size of buckets.
void StepModel::add_data_parallel(StepParts& parts, const Candidate& c, const Staged& staged,
                                  std::int64_t bucket_bytes) {
  const std::vector<StageShape>& shapes = memory_.stages(c);
  const DataParallelPlan plan = data_parallel_plan(problem_, c, shapes, staged.slowest);
  const double rounds = double(c.micro_batches),
               reductions = plan.stage >= 2 && !plan.reduce_once ? rounds : 1;
  std::int64_t layers = 0, block = 0, root = 0;
  for (const std::size_t stage : stages_of_rank(c, staged.slowest)) {
    const StageShape& shape = shapes[stage];
    layers += shape.layers, block = std::max(block, shape.largest_block), root += shape.root;
  }
  const double forward = staged.of_slowest.forward.total(), backward = staged.of_slowest.backward();
  double reduce = 0, tail = 0, once = 0, gather = 0, shown_gather = 0, moved = 0, sums = 0, packed = 0;
  for (std::size_t kind = 0; kind < plan.elements.size(); ++kind) {
    const DataParallelPlan::Elements& elements = plan.elements[kind];
    const auto numel = double(elements.numel);
    if (numel == 0) continue;
    const double gradients = numel * plan.bytes.gradient, parameters = numel * plan.bytes.parameter,
                 shard = numel / elements.shards;
    const std::int64_t stride = kind > 0 ? std::int64_t{c.tp} * c.ep : c.tp;
    const bool everywhere = plan.stage == 0 && !plan.share_parameters;
    // Units of zero3 are gathered into memory of their own; all else is in memory that ranks share.
    const Reach units = reach_of(std::int64_t{elements.shards} * (everywhere ? elements.replicas : 1), stride,
                                 problem_.cluster);
    Reach reach = units;
    reach.in_place = true;
    const Operation operation = everywhere ? Operation::kAllReduce : Operation::kReduceScatter;
    // Stage 3 reduces a unit at a time, the others a bucket. Fewer pieces take less time, smaller ones
    // leave less behind.
    const bool any = plan.stage != 3 && bucket_bytes == 0;
    const double piece = plan.stage == 3 ? double(std::max<std::int64_t>(1, block)) * plan.bytes.gradient
                                         : double(any ? kLeastBucket : bucket_bytes);
    const double pieces = any ? 1 : std::ceil(gradients / piece);
    reduce += pieces * network_.seconds(operation, gradients / pieces, reach);
    tail += network_.seconds(operation, std::min(gradients, piece), reach);
    if (elements.replicas > 1 && operation == Operation::kReduceScatter)
      once += network_.seconds(Operation::kAllReduce, shard * plan.bytes.gradient,
                               reach_of(elements.replicas, stride * elements.shards, problem_.cluster));
    if (plan.stage == 3 && !plan.share_parameters) {
      // Units one ahead of what computes; the root before anything does.
      const double whole = double(kind == 0 ? root : 0) * plan.bytes.parameter,
                   each = network_.seconds(Operation::kAllGather,
                                           (parameters - whole) / double(std::max<std::int64_t>(1, layers)),
                                           units),
                   first = network_.seconds(Operation::kAllGather, whole, units);
      const double unit = 1 / double(std::max<std::int64_t>(1, layers));
      const double again = c.reshard ? 1 : 0;
      gather += rounds * (double(layers) * each * (1 + again)) + first;
      shown_gather +=
          rounds * double(layers) *
              (exposed(each, forward * unit, overlap_) + again * exposed(each, backward * unit, overlap_)) +
          first;
    } else if (plan.stage > 0 && !plan.share_parameters) {
      parts.publish += network_.seconds(Operation::kAllGather, parameters, reach);
    }
    const bool sharded = plan.stage > 0 || plan.share_parameters;
    const double own = sharded ? shard : numel;
    sums += own * plan.bytes.gradient;
    // Stage 2 packs the gradients of each micro-batch; sums behind the first one are added to the shard.
    if (plan.stage == 2 && !plan.reduce_once) packed += rounds * 2 * gradients;
    if (plan.stage >= 2 && !plan.reduce_once) packed += (rounds - 1) * 3 * shard * plan.bytes.gradient;
    moved += own * update_bytes(plan.bytes);
  }
  const bool alone = c.data_ranks() * c.cp_ring * c.cp_ulysses == 1;
  if (!alone) {
    // Gathers of the same backward take their part of it.
    const double behind = std::max(0.0, backward - (gather - shown_gather) / (2 * rounds));
    const double shown = exposed(std::max(0.0, reduce - tail), behind, overlap_);
    parts.tail = reductions * tail;
    parts.reduce = reductions * (shown + tail) + once;
    parts.hidden.reduce = reductions * reduce + once - parts.reduce;
    parts.reduce += rates_.memory(packed);
    parts.gather = shown_gather, parts.hidden.gather = gather - shown_gather;
  }
  parts.norm = rates_.memory(sums);
  parts.optimizer = rates_.optimizer(moved);
}

StepParts StepModel::of(const Candidate& c) {
  if (problem_.program != Program::kIsograd) return published_step(problem_, c, memory_.stages(c));
  const Staged& times = staged(c);
  return made(c, times, pipelines_.seconds(c, times.times), c.bucket_bytes);
}

StepParts StepModel::made(const Candidate& c, const Staged& times, double length, std::int64_t bucket_bytes) {
  const double rounds = double(c.micro_batches);
  Seconds of_round, sum;
  for (const Seconds* part : {&times.of_slowest.forward, &times.of_slowest.inputs, &times.of_slowest.weights})
    of_round.add(*part);
  sum.add(of_round, rounds);
  StepParts parts{.products = sum.products,
                  .attention = sum.attention,
                  .memory_bound = sum.memory,
                  .overhead = sum.overhead,
                  .tp = sum.tp,
                  .cp = sum.cp,
                  .ep = sum.ep};
  parts.hidden.tp = sum.hidden_tp, parts.hidden.cp = sum.hidden_cp, parts.hidden.ep = sum.hidden_ep;
  parts.bubble = c.pp == 1 ? 0 : std::max(0.0, length - sum.total());
  add_data_parallel(parts, c, times, bucket_bytes);
  if (!problem_.work.documents.empty()) {
    const auto key = std::pair{c.data_ranks(), c.micro_batch * c.micro_batches};
    const auto [found, is_new] = slowest_.try_emplace(key, 1);
    if (is_new) found->second = packs_of(pairs_, key.first, key.second).slowest;
    parts.uneven = parts.attention * (found->second - 1);
  }
  return parts;
}

double StepModel::least(const Candidate& candidate) {
  if (problem_.program != Program::kIsograd) return of(candidate).total();
  const Staged& times = staged(candidate);
  return made(candidate, times, shortest(candidate, times.times), 0).total() * kBarelyLess;
}

double StepModel::least_length(const Candidate& candidate) {
  const Staged& times = staged(candidate);
  const double busy = times.of_slowest.forward.total() + times.of_slowest.backward();
  return std::max(double(candidate.micro_batches) * busy, shortest(candidate, times.times)) * kBarelyLess;
}

double StepModel::least_of_mesh(const Candidate& mesh) {
  const Passes& passes = passes_of(mesh);
  double mixtures = 0, before = 0, sum = 0;
  const std::vector<StageShape>& stages = memory_.stages(mesh);
  for (const StageShape& stage : stages) mixtures += double(stage.mixtures);
  const double dense = double(problem_.model.layers) - mixtures;
  const double all = dense * (passes.dense.forward.total() + passes.dense.backward()) +
                     mixtures * (passes.mixture.forward.total() + passes.mixture.backward()) +
                     passes.output.forward.total() + passes.output.backward();
  // The longest rank takes at least as long as the mean of them: their waits for the first forward too.
  for (int rank = 0; rank < mesh.pp; ++rank) {
    const StageShape& stage = stages[std::size_t(rank)];
    sum += before;
    before += double(stage.layers - stage.mixtures) * passes.dense.forward.total() +
              double(stage.mixtures) * passes.mixture.forward.total();
  }
  return (double(mesh.micro_batches) * all + sum) / mesh.pp * kBarelyLess;
}

std::int64_t StepModel::best_bucket_bytes(const Candidate& candidate, std::int64_t most) {
  std::int64_t best = candidate.bucket_bytes;
  if (candidate.strategy == Strategy::kZero3) return best;  // its units are blocks
  const Staged& times = staged(candidate);
  double least = 0;
  for (std::int64_t bytes = kLeastBucket; bytes <= most; bytes *= 2) {
    StepParts parts;
    add_data_parallel(parts, candidate, times, bytes);
    if (parts.reduce == 0) break;  // nobody to sum with
    if (bytes == kLeastBucket || parts.reduce < least) best = bytes, least = parts.reduce;
  }
  return best;
}

std::vector<Planned::Part> StepModel::explain(const Candidate& candidate, const StepParts& parts) {
  const Origin rates = rates_.origin();
  const auto of_axis = [&](Axis axis) { return std::max(origin_of(candidate, axis), rates); };
  const double width = widths_of(problem_.program, rates, problem_.model.experts.count > 0).seconds;
  std::vector<Planned::Part> lines;
  const auto add = [&](const char* name, std::string formula, double value, Origin origin) {
    if (value > 0) lines.push_back({name, std::move(formula), within(value, width, origin)});
  };
  const std::int64_t rounds = candidate.micro_batches;
  add("products",
      fmt::format("{} {}, forward and both halves of backward", rounds,
                  unit_of(static_cast<double>(rounds), "micro-batches")),
      parts.products, rates);
  add("attention", "4 FLOPs a pair and head dimension, 3.5 times", parts.attention, rates);
  add("memory-bound operators", "their bytes / memory bandwidth", parts.memory_bound, rates);
  add("overhead", "operators * time of each", parts.overhead, rates);
  add("tp", "latency * steps + bytes / bandwidth, for each product's tokens", parts.tp, of_axis(Axis::kTp));
  add("cp", "keys and values beyond the attention that hides them", parts.cp, of_axis(Axis::kRing));
  add("ep", "tokens to experts and back", parts.ep, of_axis(Axis::kExpert));
  add("bubble", fmt::format("{} on {} ranks, simulated", name_of(candidate.schedule), candidate.pp),
      parts.bubble, rates);
  add("gather", "units beyond the compute that hides them", parts.gather, of_axis(Axis::kShard));
  add("reduce", fmt::format("max(0, reduce - backward) + last bucket ({:.3g} s)", parts.tail), parts.reduce,
      of_axis(Axis::kData));
  add("norm", "gradients read once", parts.norm, rates);
  add("optimizer", "bytes of gradients, masters, states and parameters", parts.optimizer, rates);
  add("publish", "all-gather of parameters", parts.publish, of_axis(Axis::kShard));
  add("uneven packs", "attention of the slowest rank beyond the mean", parts.uneven, rates);
  return lines;
}

StepModel::Behind StepModel::behind(const Candidate& candidate) {
  const Staged& times = staged(candidate);
  const Passes& passes = passes_of(candidate);
  const bool dense = passes.dense.forward.total() > 0, mixture = passes.mixture.forward.total() > 0;
  const Pass &layer = dense ? passes.dense : passes.mixture, &experts = mixture ? passes.mixture : layer;
  const auto share = [](const Pass& of, double Seconds::*exchange) {
    return (of.forward.*exchange + of.inputs.*exchange) / (of.forward.total() + of.backward());
  };
  return {.forward = times.of_slowest.forward.total(),
          .backward = times.of_slowest.backward(),
          .layer_forward = layer.forward.total(),
          .layer_backward = layer.backward(),
          .tp = share(layer, &Seconds::tp),
          .ep = share(experts, &Seconds::ep)};
}

StepParts StepModel::data_parallel(const Candidate& candidate) {
  StepParts parts;
  add_data_parallel(parts, candidate, staged(candidate), candidate.bucket_bytes);
  return parts;
}

std::vector<Span> StepModel::timeline(const Candidate& candidate) {
  const StageTimes times = staged(candidate).times;
  const StepParts parts = of(candidate);
  std::vector<Span> spans;
  if (candidate.schedule == Schedule::kNone) {
    double now = 0;
    for (std::int64_t i = 0; i < candidate.micro_batches; ++i) {
      const double middle = now + times.forward[0],
                   end = middle + times.backward_inputs[0] + times.backward_weights[0];
      spans.push_back({"stage 0 compute", fmt::format("F{}", i), now, middle});
      spans.push_back({"stage 0 compute", fmt::format("B{}", i), middle, end});
      now = end;
    }
  } else {
    PipelineTable table;
    const PipelineTimeline timeline = pipelines_.timeline(candidate, times, table);
    for (std::size_t rank = 0; rank < table.ranks.size(); ++rank)
      for (std::size_t i = 0; i < table.ranks[rank].size(); ++i) {
        const PipelineAction& action = table.ranks[rank][i];
        const char kind = "FBIW"[std::size_t(action.kind)];
        spans.push_back({fmt::format("stage {} compute", action.stage),
                         fmt::format("{}{}", kind, action.micro_batch), timeline.spans[rank][i].begin,
                         timeline.spans[rank][i].end});
      }
  }
  double now = pipelines_.seconds(candidate, times);
  const double hidden = parts.hidden.reduce;
  if (parts.reduce + hidden > 0)
    spans.push_back({"dp", "reduce", std::max(0.0, now - hidden), now + parts.reduce});
  now += parts.reduce + parts.gather;
  for (const auto& [name, seconds] : {std::pair{"norm", parts.norm}, {"optimizer", parts.optimizer}}) {
    spans.push_back({"optimizer", name, now, now + seconds});
    now += seconds;
  }
  if (parts.publish > 0) spans.push_back({"dp", "gather parameters", now, now + parts.publish});
  return spans;
}

}  // namespace isograd::planner
