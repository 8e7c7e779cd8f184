#include "train/rank_layout.hpp"

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <unordered_map>

#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "layout/flat.hpp"
#include "parallel/data/rank_roles.hpp"
#include "train/device.hpp"
#include "train/task.hpp"

namespace isograd {
namespace {

Range both(Range a, Range b) {
  const std::int64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

// The part of a bucket's range that overlaps a slot, in elements of the slot.
Range within(Range range, const Slot& slot) {
  const Range part = both(range, {slot.offset, slot.offset + slot.numel});
  return part.size() == 0 ? Range{} : Range{part.begin - slot.offset, part.end - slot.offset};
}

std::vector<OwnedBy> within(const std::vector<OwnedBy>& owners, const Slot& slot) {
  std::vector<OwnedBy> result;
  auto owner = std::partition_point(owners.begin(), owners.end(),
                                    [&](const OwnedBy& one) { return one.elements.end <= slot.offset; });
  for (; owner != owners.end() && owner->elements.begin < slot.offset + slot.numel; ++owner)
    result.push_back({owner->rank, within(owner->elements, slot)});
  return result;
}

// The roles of the ranks that hold copies of what a rank holds.
using Roles = std::vector<std::pair<int, RankRoles>>;

Roles roles_of(const PlannedBucket& bucket, const Grid& grid, int rank) {
  Roles result;
  for (const int other : grid.ranks_along(bucket.plan.sync.copies, rank))
    result.emplace_back(other, RankRoles(grid, bucket.plan.sync, bucket.asked, other));
  return result;
}

LaidBucket lay_out_bucket(PlannedBucket planned, const Roles& roles, int rank) {
  LaidBucket result;
  for (const auto& [other, role] : roles) {
    const HeldRanges share = role.held_ranges(planned.plan.numel, planned.in_shards);
    if (other == rank) result.held = share.held, result.sharded = share.sharded;
    if (share.owned.size() > 0) result.owners.push_back({other, share.owned});
  }
  std::sort(result.owners.begin(), result.owners.end(),
            [](const OwnedBy& a, const OwnedBy& b) { return a.elements.begin < b.elements.begin; });
  result.padding = planned.plan.numel;
  for (const Slot& slot : planned.plan.slots) result.padding -= slot.numel;
  result.planned = std::move(planned);
  return result;
}

// Bytes of `numel` elements of the bucket, of which the rank holds `held`.
PersistentBytes kept_of(std::int64_t numel, std::int64_t held, const PlannedBucket& bucket,
                        const ElementBytes& bytes) {
  const auto gradient = static_cast<std::int64_t>(c10::elementSize(bucket.gradients));
  return {.parameters = (bucket.parameters_in_shards ? held : numel) * bytes.parameter,
          .gradients = (bucket.gradients_in_shards ? held : numel) * gradient,
          .master = held * bytes.master,
          .state = held * bytes.state};
}

}  // namespace

std::int64_t RankLayout::numel() const {
  std::int64_t result = 0;
  for (const LaidBucket& bucket : buckets) result += bucket.planned.plan.numel - bucket.padding;
  return result;
}

RankLayout lay_out(const NamedTensors& parameters, std::vector<PlannedBucket> buckets, const Grid& grid,
                   int rank, const ElementBytes& bytes, const Layout::Named& placements) {
  RankLayout result{.grid = grid, .rank = rank, .parameters = {}, .buckets = {}, .padding = {}, .total = {}};
  std::map<std::pair<SyncAxes, AxisSet>, Roles> roles;  // the same for many buckets
  std::unordered_map<std::string, std::pair<std::size_t, const Slot*>> places;
  for (PlannedBucket& bucket : buckets) {
    Roles& ranks = roles[{bucket.plan.sync, bucket.asked}];
    if (ranks.empty()) ranks = roles_of(bucket, grid, rank);
    result.buckets.push_back(lay_out_bucket(std::move(bucket), ranks, rank));
  }
  for (std::size_t b = 0; b < result.buckets.size(); ++b) {
    const LaidBucket& bucket = result.buckets[b];
    const BucketPlan& plan = bucket.planned.plan;
    result.total += kept_of(plan.numel, bucket.held.size(), bucket.planned, bytes);
    std::int64_t padding_held = bucket.held.size();
    for (const Slot& slot : plan.slots) {
      places[slot.name] = {b, &slot};
      padding_held -= within(bucket.held, slot).size();
    }
    result.padding += kept_of(bucket.padding, padding_held, bucket.planned, bytes);
  }
  for (const NamedParameter& parameter :
       trainable_parameters(held_parameters(parameters, placements, grid, rank))) {
    const auto& [b, slot] = places.at(parameter.name);
    const LaidBucket& bucket = result.buckets[b];
    const auto declared = std::find_if(placements.begin(), placements.end(),
                                       [&](const auto& one) { return one.first == parameter.name; });
    Placement placement =
        declared == placements.end() ? placed(grid, parameter.tensor.sizes().vec()) : declared->second;
    const Range held = within(bucket.held, *slot);
    result.parameters.push_back({.name = parameter.name,
                                 .placement = placement,
                                 .sync = sync_axes(placement, grid),
                                 .local_shape = slot->shape,
                                 .bucket = b,
                                 .held = held,
                                 .owners = within(bucket.owners, *slot),
                                 .kept = kept_of(slot->numel, held.size(), bucket.planned, bytes)});
  }
  return result;
}

RunLayout lay_out(const RunConfig& config, const NamedTensors& parameters, const ModelUnits& units,
                  const RanksOfRun& ranks, int rank, const Layout::Named& placements) {
  const Grid grid = grid_of(config, ranks.size);
  DataParallelPlan plan = make_plan(config, ranks);
  RankLayout layout = lay_out(parameters, plan_layout(config, parameters, units, ranks, rank, placements),
                              grid, rank, plan.bytes, placements);
  for (const LaidBucket& bucket : layout.buckets)
    plan.elements.at(cut_along_data(bucket.planned.plan.sync, grid) ? 1 : 0).numel +=
        bucket.planned.plan.numel - bucket.padding;
  return {.layout = std::move(layout),
          .config = config,
          .plan = plan,
          .description = describe_layout(config, ranks),
          .hosts = planned_hosts(ranks.size, 1)};
}

RunLayout lay_out(const RunConfig& config, int ranks, int rank, int hosts) {
  check_but_devices(config, ranks);
  if (rank < 0 || rank >= ranks)
    refuse(fmt::format("--rank {}", rank), fmt::format("{} rank{}", ranks, ranks == 1 ? "" : "s"),
           fmt::format("0 to {}", ranks - 1), "Name one of them, or more ranks with --ranks");
  const std::string backend = backend_of(config, ranks);
  Hosts planned = planned_hosts(ranks, hosts);
  if (hosts > 1 && (backend == "shm" || backend == "nccl"))
    refuse(fmt::format("--hosts {}", hosts), fmt::format("the backend \"{}\"", backend),
           "one that spans hosts", "Set parallel.backend = \"shm+mpi\" (docs/hosts.md)");
  const RanksOfRun on(ranks, ranks == 1 || backend == "shm" || (backend == "shm+mpi" && hosts == 1));
  const Grid grid = grid_of(config, ranks);
  const auto model = model_without_values(config);
  const auto named = model->named();
  check_clip_groups(config, named);
  Layout::Named placements;
  if (held_together(config)) placements = model->placements(grid);
  for (std::size_t i = 0; i < placements.size(); ++i)
    at::Tensor(named[i].second)
        .set_data(at::empty(local_shape(placements[i].second, grid, rank), named[i].second.options()));
  RunLayout run = lay_out(config, named, model->make_units(), on, rank, placements);
  run.hosts = std::move(planned);
  return run;
}

}  // namespace isograd
