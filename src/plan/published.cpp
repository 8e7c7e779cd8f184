// The constants, by program, device and precision; steps of the programs of published rows, by laws whose
// constants were fitted on them (docs/planning_reference.md). nanotron by stage; all others with even stages.
// Peaks, links and latencies are the cluster's.
#include <algorithm>
#include <string_view>

#include "plan/time.hpp"

namespace isograd::planner {
namespace {

// Everything that both laws read of a problem, in floating point.
struct Terms {
  explicit Terms(const Problem& problem)
      : constants(problem.constants),
        hidden(double(problem.model.hidden)),
        feed_forward(double(problem.model.feed_forward)),
        vocabulary(double(problem.model.vocabulary)),
        sequence(double(problem.work.sequence)),
        peak(problem.cluster.device.peak[std::size_t(Precision::kBFloat16)]),
        memory(problem.cluster.device.memory_bandwidth * constants.share_of_memory),
        unit(double(problem.cluster.links.front().ranks)),
        inside(problem.cluster.links.front().bandwidth * constants.share_inside),
        across(problem.cluster.links.back().bandwidth * constants.share_across),
        step_inside(problem.cluster.links.front().latency),
        step_across(problem.cluster.links.back().latency) {}

  // The steps of a gather or a reduce-scatter in a ring (NCCL, src/graph/tuning.cc), without its start.
  double ring(double ranks, double hosts) const {
    return ranks > 1 ? step_inside * (ranks - hosts) + step_across * (hosts - 1) : 0;
  }
  // A data rank's part of its host's network: adapters are shared with the ranks along tp.
  double data(double data_ranks, double tp) const {
    if (tp * data_ranks <= unit) return inside;
    constexpr double kAdapters = 8;  // of a host, for all devices of the table
    return std::min(across * std::max(1.0, kAdapters / std::min(kAdapters, tp)), inside);
  }
  double tensor(double tp) const { return tp > unit ? unit * across : inside; }
  // Norm, optimizer and zeroing move 40 bytes of a parameter with fp32 states.
  double optimizer(double elements) const { return 40 * elements / memory; }
  // The last backward, two thirds of a micro-batch, hides a part of it.
  double exposed_reduction(double reduce, double slot) const {
    return exposed(reduce, slot * 2 / 3, constants.overlap);
  }

  const Constants& constants;
  double hidden, feed_forward, vocabulary, sequence, peak, memory, unit, inside, across, step_inside,
      step_across;
};

double part_of_others(double ranks) { return (ranks - 1) / ranks; }

// nanotron (github.com/huggingface/nanotron): all heads have keys of their own, one process a device whose
// Python launches every operator; ZeRO-0 is DDP, ZeRO-1 reduces after the last backward.
StepParts nanotron_step(const Problem& problem, const Candidate& candidate,
                        const std::vector<StageShape>& stages) {
  const Terms of(problem);
  const double h = of.hidden, f = of.feed_forward, tp = candidate.tp, d = double(candidate.data_ranks()),
               G = double(candidate.micro_batches), T = double(candidate.micro_batch) * of.sequence,
               kept = T * (of.constants.by_hidden * h + of.constants.by_feed_forward * f) / tp;
  const bool shards_states = candidate.strategy == Strategy::kZero1;
  // Stages on other hosts: at each transfer the ranks along tp wait for one another's launches.
  const bool apart = candidate.pp > 1 && candidate.ranks > of.unit && tp > 1;
  StepParts parts;
  double slowest = 0, all = 0, elements = 0;
  for (const StageShape& stage : stages) {
    const double layers = double(stage.layers), head = stage.outputs ? 1 : 0,
                 tables = problem.model.tied_output && stage.embeds ? 1 : (stage.embeds ? 1 : 0) + head,
                 held = (layers * (4 * h * h + 3 * h * f + 2 * h) + tables * of.vocabulary * h) / tp;
    // Two FLOPs of a multiplication, forward and twice in backward; attention causal, 2 and 5 of T S h.
    const double products = 6 * T * (layers * (4 * h * h + 3 * h * f) + head * of.vocabulary * h) / tp /
                            (of.peak * of.constants.share_of_peak);
    const double attention =
        7 * T * of.sequence * h * layers / tp / (of.peak * of.constants.share_of_attention);
    // 54: passes over fp32 logits; 12: a bf16 gradient is added to one of fp32.
    const double bytes = of.constants.passes * layers * kept + 54 * head * T * of.vocabulary / tp + 12 * held;
    const double exchanges =
        tp == 1 ? 0
                : (8 * layers + 2 * head) * (2 * T * h * part_of_others(tp) / of.tensor(tp) + kRingStart +
                                             of.ring(tp, std::max(1.0, tp / of.unit)));
    const double host = of.constants.layer_overhead * (layers + 1 + head) *
                        (tp == 1 ? 1
                         : apart ? 2 + tp
                                 : 2);
    const double busy = products + attention + bytes / of.memory + exchanges, slot = std::max(busy, host);
    all += slot, elements = std::max(elements, held);
    if (slot <= slowest) continue;
    slowest = slot;
    parts.products = G * products, parts.attention = G * attention,
    parts.memory_bound = G * bytes / of.memory;
    parts.tp = G * exchanges, parts.overhead = G * (slot - busy);
  }
  parts.bubble = all - slowest;
  const double hosts = tp * d <= of.unit ? 1 : std::min(std::max(2.0, d * tp / of.unit), d);
  const double wire = of.data(d, tp), latency = of.ring(d, hosts);
  const double reduce = 2 * (part_of_others(d) * 4 * elements / wire + latency);
  parts.reduce = shards_states ? reduce : of.exposed_reduction(reduce, slowest);
  parts.hidden.reduce = reduce - parts.reduce;
  if (shards_states) parts.gather = part_of_others(d) * 2 * elements / wire + latency;
  parts.optimizer = of.optimizer(elements / (shards_states ? d : 1));
  return parts;
}

// Every other program: stages are even, gradients travel as bf16, and no host is waited for.
StepParts other_step(const Problem& problem, const Candidate& candidate) {
  const Terms of(problem);
  const ModelShape& model = problem.model;
  const double h = of.hidden, f = of.feed_forward, L = double(model.layers), tp = candidate.tp,
               pp = candidate.pp, cp = double(candidate.cp_ring) * candidate.cp_ulysses, share = tp * pp,
               G = double(candidate.micro_batches), T = double(candidate.micro_batch) * of.sequence / cp,
               d = double(candidate.data_ranks()) * cp, again = candidate.checkpoint ? 1 : 0,
               z = candidate.shards, layer = products_of_layer(model),
               elements = (L * layer + 2 * of.vocabulary * h) / share;
  const bool whole = candidate.strategy == Strategy::kZero3;
  const double peak = of.peak * of.constants.share_of_peak,
               layers_peak = problem.cluster.device.peak[std::size_t(problem.work.precision)] *
                             of.constants.share_of_peak;
  const double products =
      ((6 + 2 * again) * T * L * layer / layers_peak + 6 * T * of.vocabulary * h / peak) / share;
  const double attention =
      (7 + 2 * again) * T * of.sequence * h * L / share / (of.peak * of.constants.share_of_attention);
  const double kept = of.constants.by_hidden * h + of.constants.by_feed_forward * (model.gated ? 1 : 0.5) * f;
  const double bytes = of.constants.passes * (1 + again / 3) * T * L * kept / share +
                       54 * T * of.vocabulary / share + 12 * elements;
  const double exchanges = (8 + 2 * again) * L / pp * 2 * T * h * part_of_others(tp) / of.tensor(tp);
  const double busy = products + attention + bytes / of.memory + exchanges;
  double slot = busy;
  if (whole) {  // two gathers and a scatter behind the layers
    const double near = z * tp <= of.unit ? of.inside : of.data(d, tp);
    slot = std::max(slot, 3 * (part_of_others(z) * 2 * elements / near +
                               L * of.ring(z, std::max(1.0, z * tp / of.unit))));
  }
  const double reduce = whole ? 0 : 2 * part_of_others(d) * 2 * elements / of.data(d, tp);
  StepParts parts{.products = G * products,
                  .attention = G * attention,
                  .memory_bound = G * bytes / of.memory,
                  .tp = G * exchanges};
  parts.bubble = (pp - 1) / candidate.stages_per_rank * slot / (has_halves(candidate.schedule) ? 3 : 1);
  parts.gather = G * (slot - busy);
  parts.reduce = of.exposed_reduction(reduce, slot);
  parts.hidden.reduce = reduce - parts.reduce;
  parts.optimizer = of.optimizer(elements / (candidate.strategy == Strategy::kBucketed ? 1 : z));
  return parts;
}

// One share of the peak for each device of the built-in table and precision, fitted on the published rows of
// all programs but nanotron: the least sum of min(|relative error|, 0.5).
struct Share {
  std::string_view device;
  double bfloat16, float8;  // 0: no row
};
constexpr Share kShares[] = {{"a100-40", 0.752, 0},     {"a100-80", 0.681, 0},   {"h100", 0.658, 0.982},
                             {"h100-96", 0.464, 0.441}, {"h200", 0, 0.616},      {"b200", 0, 0.740},
                             {"gb200", 0.586, 0.669},   {"gb200-fp4", 0, 0.637}, {"gb300", 0, 0.904},
                             {"gb300-fp4", 0, 0.818},   {"tpu-v5p", 0, 0.999},   {"tpu-v6e", 0, 0.791},
                             {"v100", 0.361, 0}};

// FlashAttention-2 reaches 0.50 to 0.73 of an A100's peak (arXiv:2307.08691, figures 4 to 7) and a third of
// an H100's (arXiv:2407.08608); a V100 has no such kernel.
double share_of_attention(std::string_view device) {
  return device.starts_with("a100") ? 0.40 : device.starts_with("v100") ? 0.20 : 0.25;
}

}  // namespace

Constants constants_of(Program program, const Device& device, Precision precision) {
  Constants made;
  made.share_of_attention = share_of_attention(device.name);
  if (program == Program::kOther) {
    for (const Share& share : kShares)
      if (const double found = precision == Precision::kFloat8 ? share.float8 : share.bfloat16;
          share.device == device.name && found > 0)
        made.share_of_peak = found;
    made.layer_overhead = 0;
  }
  if (program == Program::kIsograd) {
    // No interpreter between operators: the lower end of what eager dispatch takes, 130 operators of 5 us.
    made.layer_overhead = 0.65e-3;
    made.overlap =
        1;  // units and buckets travel during the whole backward; what calibrate finds goes before it
    made.allocated = 1, made.fixed_bytes = 0;
  }
  return made;
}

Widths widths_of(Program program, Origin origin, bool experts) {
  double seconds = 0.30;                              // the 90th percentile of all other dense rows
  if (program == Program::kNanotron) seconds = 0.20;  // measured / predicted: 0.906 to 1.196
  if (program == Program::kIsograd && origin == Origin::kMeasured) seconds = 0.05;
  if (program == Program::kIsograd && origin == Origin::kCalibrated)
    seconds = 0.20;           // PlanHeldOut: 18.5 % at worst, on a noisy machine
  if (experts) seconds *= 2;  // how uneven routing is, nobody publishes
  return {.memory = program == Program::kIsograd ? 0.05 : 0.19, .seconds = seconds};
}

StepParts published_step(const Problem& problem, const Candidate& candidate,
                         const std::vector<StageShape>& stages) {
  return problem.program == Program::kNanotron ? nanotron_step(problem, candidate, stages)
                                               : other_step(problem, candidate);
}

}  // namespace isograd::planner
