// Alpha-beta by level, as NCCL's tuning.cc sums it: a ring of n ranks on u hosts takes n - u steps inside and
// u - 1 between them.
#include "plan/collectives.hpp"

#include <algorithm>
#include <cmath>

#include "plan/constants.hpp"

namespace isograd::planner {
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
            .level = calibrated->backend,
            .origin = Origin::kCalibrated};

  Cost ring, tree;
  // Ranks that no inner level joins: each level joins `before` parts to `after`.
  std::int64_t before = n;
  double slowest_inside = 0;
  for (std::size_t level = 0; level < cluster_.links.size() && before > 1; ++level) {
    const Link& link = cluster_.links[level];
    const bool last = level + 1 == cluster_.links.size();
    const std::int64_t here = last ? n : members(link.ranks, reach);
    const std::int64_t after = (n + here - 1) / here;
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
    if (sent / bandwidth > ring.transfer)
      ring.transfer = sent / bandwidth, ring.level = link.name, ring.origin = link.origin;
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
