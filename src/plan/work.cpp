// The products, operators and bytes of a rank for one micro-batch, as isograd's decoder does it, and how fast
// a device and the network are: alpha-beta by level, as NCCL's tuning.cc sums it, where a ring of n ranks on
// u hosts takes n - u steps inside and u - 1 between them.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "plan/time.hpp"

namespace isograd::planner {
namespace {

// Causal attention has them.
double pairs_of(std::int64_t tokens) { return double(tokens) * (double(tokens) + 1) / 2; }

}  // namespace

LayerWork layer_work(const Problem& problem, const Candidate& candidate, std::int64_t layer,
                     std::optional<double> pairs) {
  const ModelShape& model = problem.model;
  const std::int64_t tokens = tokens_of(problem.work, candidate), tp = candidate.tp, hidden = model.hidden,
                     queries = most_of(model.heads, tp) * model.head_dim,
                     keys = most_of(model.key_value_heads, tp) * model.head_dim;
  const double element = bytes_of(problem.work.precision), T = double(tokens), h = double(hidden);
  LayerWork work{
      .products = {{tokens, queries, hidden}, {tokens, keys, hidden, 2}, {tokens, hidden, queries}}};
  const bool mixture = model.has_experts(layer);
  // Rows that feed-forward networks read, and the width of what they multiply.
  const double rows = mixture ? T * double(model.experts.per_token) : T;
  std::int64_t width = most_of(model.feed_forward, tp);
  const auto network = [&](std::int64_t m, std::int64_t wide, double count) {
    work.products.push_back({m, wide, hidden, count * (model.gated ? 2 : 1)});
    work.products.push_back({m, hidden, wide, count});
  };
  double multiplied = 0;
  if (mixture) {
    const ModelShape::Experts& experts = model.experts;
    work.products.push_back({tokens, experts.count, hidden});
    // A rank's experts get as many tokens as it sends, shared among them. By chance the rank that gets most,
    // for which the others wait, has sqrt(2 ln(ranks)) standard deviations more than the mean; a word chooses
    // alike wherever it stands.
    const std::int64_t own = most_of(experts.count, candidate.ep);
    const double ep = candidate.ep, alike = std::max(1.0, ep * T / double(model.vocabulary)),
                 most = rows + std::sqrt(2 * std::log(ep) * rows * alike * (1 - 1 / ep));
    width = most_of(experts.feed_forward, tp);
    network(std::max<std::int64_t>(1, std::int64_t(most / double(own))), width, double(own));
    if (experts.shared_feed_forward > 0) {
      network(tokens, most_of(experts.shared_feed_forward, tp), 1);
      multiplied += T * double(most_of(experts.shared_feed_forward, tp));
    }
    work.expert_bytes = candidate.ep > 1 ? rows * h * element : 0;
  } else {
    network(tokens, width, 1);
  }
  multiplied += rows * double(width);
  // Two products of a head for each pair that is not masked; packs say how many (without documents: causal).
  if (!pairs) pairs = packs_of(pairs_by_sequence(problem.work)).pairs;
  work.pairs = 4 * double(queries) * *pairs * double(candidate.micro_batch) /
               double(candidate.cp_ring * candidate.cp_ulysses);
  // Two norms that read and write, two sums that read twice; over tp where the sequence is; rotated queries
  // and keys; gate and up read, their product written; a token copied to its experts, and their results
  // copied and added by weight; over ep, rows put in the order of the rank's experts and back, as much in the
  // backward, for which twice the forward's bytes are counted.
  const double streams = candidate.sequence_parallel ? double(tp) : 1;
  work.bytes =
      element * ((2 * 2 + 2 * 3) * T * h / streams + 2 * T * double(queries + keys) + 3 * multiplied);
  if (mixture) work.copies = element * rows * h * (2 + 5 + (candidate.ep > 1 ? 2.0 / 3 * 4 : 0));
  // Queries, keys and values side by side before they go to other ranks and apart behind it, and what comes
  // back in the order of the heads: as much in the backward, for which twice the forward's bytes are counted.
  if (candidate.cp_ulysses > 1) work.bytes += element * T * 2 / 3 * double(6 * queries + 8 * keys);
  // A mixture's router, order and copies, and for each expert three products of a part of the rows.
  work.operators = mixture ? 30 + 4 * int(most_of(model.experts.count, candidate.ep)) : 20;
  if (tp > 1) work.tp_bytes = T * h * element;
  work.ring_bytes = candidate.cp_ring > 1 ? 2 * T * double(keys) / candidate.cp_ulysses * element : 0;
  work.ulysses_bytes = candidate.cp_ulysses > 1 ? 2 * T * double(queries + keys) * element : 0;
  return work;
}

LayerWork output_work(const Problem& problem, const Candidate& candidate) {
  const ModelShape& model = problem.model;
  const std::int64_t tokens = tokens_of(problem.work, candidate),
                     vocabulary = most_of(model.vocabulary, candidate.tp);
  LayerWork work{.products = {{tokens, vocabulary, model.hidden}}};
  // Logits are read for their largest, their sum and their gradient.
  work.bytes = 3 * double(tokens) * double(vocabulary) * bytes_of(problem.work.precision);
  work.operators = 10;
  if (candidate.tp > 1)
    work.tp_bytes = double(tokens) * double(model.hidden) * bytes_of(problem.work.precision);
  return work;
}

std::vector<double> pairs_by_sequence(const Work& work) {
  if (work.documents.empty()) return {pairs_of(work.sequence)};
  std::vector<double> pairs(1, 0);
  std::int64_t room = work.sequence;
  for (std::int64_t document : work.documents)
    while (document > 0) {
      const std::int64_t part = std::min(document, room);
      pairs.back() += pairs_of(part);
      document -= part, room -= part;
      if (room == 0) pairs.push_back(0), room = work.sequence;
    }
  if (pairs.size() > 1) pairs.pop_back();  // not full: its rest is the next documents'
  return pairs;
}

Packs packs_of(const std::vector<double>& pairs, std::int64_t ranks, std::int64_t sequences_of_rank) {
  const double mean = std::accumulate(pairs.begin(), pairs.end(), 0.0) / double(pairs.size());
  if (pairs.size() == 1) return {.pairs = mean};
  // Steps of the corpus, from its beginning again where it ends: the mean of their slowest ranks.
  constexpr std::int64_t kMostSequences = 1 << 20, kMostSteps = 16;
  const std::int64_t of_step = std::max<std::int64_t>(1, ranks * sequences_of_rank);
  const std::int64_t steps = std::clamp<std::int64_t>(kMostSequences / of_step, 1, kMostSteps);
  double slowest = 0;
  std::size_t next = 0;
  for (std::int64_t step = 0; step < steps; ++step) {
    double most = 0;
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      double of_rank = 0;
      for (std::int64_t i = 0; i < sequences_of_rank; ++i) of_rank += pairs[next++ % pairs.size()];
      most = std::max(most, of_rank);
    }
    slowest += most / (mean * double(sequences_of_rank));
  }
  return {.pairs = mean, .slowest = slowest / double(steps)};
}

namespace {

double size(std::int64_t of) { return double(std::max<std::int64_t>(1, of)); }

// Between the nearest sizes that are known; those outside of all sizes take the border's. The time of an
// operation is linear in 1/size: it has a part of its own, which larger sizes share among more. Where none of
// the corners around it was measured, as the product takes too long, the nearest measured points give the
// rate.
double interpolated(const std::vector<Rates::Known>& known, const std::array<double, 3>& at) {
  std::array<double, 3> below{}, above{}, part{}, inside{};  // part: of `below`
  for (std::size_t i = 0; i < at.size(); ++i) {
    const auto [least, most] =
        std::ranges::minmax(known, {}, [&](const Rates::Known& one) { return one.sizes[i]; });
    const double here = inside[i] = std::clamp(at[i], least.sizes[i], most.sizes[i]);
    below[i] = least.sizes[i], above[i] = most.sizes[i];
    for (const Rates::Known& one : known) {
      if (one.sizes[i] <= here) below[i] = std::max(below[i], one.sizes[i]);
      if (one.sizes[i] >= here) above[i] = std::min(above[i], one.sizes[i]);
    }
    part[i] = below[i] == above[i] ? 1 : (1 / here - 1 / above[i]) / (1 / below[i] - 1 / above[i]);
  }
  double time = 0, weights = 0, near = 0, nearest = 0;
  int as_near = 0;
  for (const Rates::Known& one : known) {
    double weight = 1, distance = 0;
    for (std::size_t i = 0; i < at.size(); ++i) {
      weight *= one.sizes[i] == below[i] ? part[i] : one.sizes[i] == above[i] ? 1 - part[i] : 0;
      const double apart = std::log2(inside[i] / one.sizes[i]);
      distance += apart * apart;
    }
    time += weight / one.rate, weights += weight;
    constexpr double kAsNear = 1e-6;
    if (as_near == 0 || distance < nearest - kAsNear) near = 0, as_near = 0, nearest = distance;
    if (distance < nearest + kAsNear) near += 1 / one.rate, ++as_near;
  }
  return weights > 1e-9 ? weights / time : as_near / near;
}

}  // namespace

Rates::Rates(const Problem& problem)
    : origin_(problem.calibration.empty() ? Origin::kFitted : Origin::kCalibrated) {
  const Device& device = problem.cluster.device;
  const Constants& constants = problem.constants;
  const Calibration& calibration = problem.calibration;
  const Precision precision = problem.work.precision;
  constexpr double kOfLayer = 130;  // operators of a layer, forward and backward, that layer_overhead is of
  const auto found = [](double calibrated, double otherwise) {
    return calibrated > 0 ? calibrated : otherwise;
  };
  flops_ = device.peak[std::size_t(precision)] * constants.share_of_peak;
  attention_flops_ = device.peak[std::size_t(precision)] * constants.share_of_attention;
  memory_ = found(calibration.memory_bandwidth, device.memory_bandwidth * constants.share_of_memory);
  copies_ = found(calibration.expert_bandwidth, memory_);
  operator_ = found(calibration.operator_overhead, constants.layer_overhead / kOfLayer);
  optimizer_ = found(calibration.optimizer_bandwidth, memory_);
  for (const auto& of : calibration.products)
    if (of.precision == precision && of.flops > 0)
      products_.push_back({{size(of.m), size(of.n), size(of.k)}, of.flops});
  for (const auto& of : calibration.attention)
    if (of.precision == precision && of.flops > 0)
      attention_.push_back({{size(of.length), size(of.head_dim), 1}, of.flops});
}

double Rates::seconds(const Product& product) const {
  const double flops = 2 * product.count * double(product.m) * double(product.n) * double(product.k);
  if (flops == 0) return 0;
  return flops / (products_.empty()
                      ? flops_
                      : interpolated(products_, {size(product.m), size(product.n), size(product.k)}));
}

double Rates::attention(double flops, std::int64_t length, std::int64_t head_dim) const {
  if (flops == 0) return 0;
  if (!attention_.empty()) return flops / interpolated(attention_, {size(length), size(head_dim), 1});
  // Calibrated products alone: as tiles of 128 rows and keys and a head of 128 are multiplied.
  if (!products_.empty()) return seconds({128, 128, 128, flops / (2.0 * 128 * 128 * 128)});
  return flops / attention_flops_;
}

// ---- collectives ----

namespace {

// Ranks of a group, at this distance from one another, that stand in a unit of `unit` consecutive ranks.
std::int64_t members(std::int64_t unit, const Reach& reach) {
  return std::clamp<std::int64_t>(unit / std::max<std::int64_t>(1, reach.stride), 1, reach.ranks);
}

}  // namespace

std::string_view name_of(Operation operation) {
  constexpr std::array<std::string_view, 5> kNames = {"all_reduce", "reduce_scatter", "all_gather",
                                                      "all_to_all", "send"};
  return kNames[std::size_t(operation)];
}

Reach reach_of(std::int64_t ranks, std::int64_t stride, const Cluster& cluster) {
  Reach reach{.ranks = ranks, .stride = stride};
  const std::int64_t unit = cluster.links.empty() ? cluster.per_host : cluster.links.front().ranks;
  if (stride * (ranks - 1) >= unit) reach.sharing = std::max<std::int64_t>(1, unit / members(unit, reach));
  return reach;
}

Reach reach_of(const Candidate& candidate, Axis axis, const Cluster& cluster) {
  const auto& c = candidate;
  const std::int64_t tp = c.tp, shard = std::int64_t{c.cp_ulysses} * c.cp_ring * c.shards;
  switch (axis) {
    case Axis::kTp: return reach_of(tp, 1, cluster);
    case Axis::kUlysses: return reach_of(c.cp_ulysses, tp, cluster);
    case Axis::kRing: return reach_of(c.cp_ring, tp * c.cp_ulysses, cluster);
    case Axis::kShard: return reach_of(shard, tp, cluster);
    case Axis::kReplicate: return reach_of(c.replicas, tp * shard, cluster);
    case Axis::kData: return reach_of(shard * c.replicas, tp, cluster);
    case Axis::kExpert: return reach_of(c.ep, tp, cluster);
    case Axis::kStage: return reach_of(c.pp, tp * shard * c.replicas, cluster);
  }
  return {};
}

Network::Network(const Cluster& cluster, const Calibration& calibration, double share_inside,
                 double share_across)
    : cluster_(cluster), calibration_(calibration), share_inside_(share_inside), share_across_(share_across) {
  std::ranges::sort(cluster_.links, {}, &Link::ranks);
}

Network::Cost Network::cost(Operation operation, double bytes, const Reach& reach) const {
  const std::int64_t n = reach.ranks;
  if (n <= 1) return {.origin = Origin::kExact};
  const double ranks = double(n), part = (ranks - 1) / ranks;
  const double rounds = operation == Operation::kAllReduce ? 2 : 1;
  const bool inside = reach.stride * (n - 1) < cluster_.per_host;
  const Calibration::Collective* calibrated = nullptr;
  if (inside)
    for (const Calibration::Collective& found : calibration_.collectives)
      if (found.ranks == n && found.operation == name_of(operation) && found.bandwidth > 0 &&
          (!calibrated || found.backend == (reach.in_place ? kInPlace : kOwnMemory)))
        calibrated = &found;
  if (calibrated)
    return {.latency = calibrated->latency,
            .transfer = (operation == Operation::kSend ? 1 : rounds * part) * bytes / calibrated->bandwidth,
            .origin = Origin::kCalibrated};

  Cost ring, tree;
  // Ranks that no inner level joins: each level joins `before` parts to `after`.
  std::int64_t before = n;
  double slowest_inside = 0;
  for (std::size_t level = 0; level < cluster_.links.size() && before > 1; ++level) {
    const Link& link = cluster_.links[level];
    const bool last = level + 1 == cluster_.links.size();
    const std::int64_t here = last ? n : members(link.ranks, reach);
    const std::int64_t after = most_of(n, here);
    if (after == before) continue;
    double bandwidth = link.bandwidth * (level == 0 ? share_inside_ : share_across_);
    // A group that has several ranks below this level sends through all their adapters, as long as no other
    // group takes them.
    if (level > 0 && operation != Operation::kSend && operation != Operation::kAllToAll)
      bandwidth *= double(
          std::max<std::int64_t>(1, cluster_.links.front().ranks / std::max<std::int64_t>(1, reach.sharing)));
    if (level == 0) slowest_inside = bandwidth;
    if (level > 0 && slowest_inside > 0) bandwidth = std::min(bandwidth, slowest_inside);
    double sent = rounds * part * bytes;
    if (operation == Operation::kSend) sent = bytes;
    // The part of an exchange that stays below does not pass this level.
    if (operation == Operation::kAllToAll) sent = bytes * double(n - n / before) / ranks;
    ring.latency += rounds * link.latency * double(before - after);
    tree.latency += rounds * link.latency *
                    (level == 0 ? double(before - after) / double(after)
                                : std::ceil(std::log2(double(before) / double(after))));
    if (sent / bandwidth > ring.transfer) ring.transfer = sent / bandwidth, ring.origin = link.origin;
    before = after;
  }
  tree.transfer = ring.transfer / kTreeShare;
  if (operation == Operation::kAllReduce && tree.latency + tree.transfer < ring.latency + ring.transfer)
    ring.latency = tree.latency, ring.transfer = tree.transfer;
  return ring;
}

double Network::seconds(Operation operation, double bytes, const Reach& reach) const {
  const Cost found = cost(operation, bytes, reach);
  return found.latency + found.transfer;
}

}  // namespace isograd::planner
