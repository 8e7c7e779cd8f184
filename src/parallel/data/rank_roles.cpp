#include "parallel/data/rank_roles.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "base/refuse.hpp"

namespace isograd {
namespace {

bool contains(const AxisSet& set, const AxisSet& part) {
  return std::includes(set.begin(), set.end(), part.begin(), part.end());
}

}  // namespace

AxisSet sharded_along(const Grid& grid, const SyncAxes& sync, const AxisSet& asked) {
  if (const AxisSet others = without(asked, kDataAxes); !others.empty())
    isograd::refuse("the axes that are sharded", fmt::format("{}", fmt::join(others, ", ")),
                    fmt::format("some of {}", fmt::join(kDataAxes, ", ")), "Shard along data axes");
  AxisSet result;
  for (const std::string& axis : sync.summed) {
    const AxisSet axes = grid.axes_of(axis);
    const bool is_factor = axes != AxisSet{axis};
    if (is_factor ? contains(kDataAxes, axes) : asked.contains(axis)) result.insert(axis);
  }
  return result;
}

bool cut_along_data(const SyncAxes& sync, const Grid& grid) {
  int copies = 1;  // among ranks that see different data
  for (const std::string& axis : sync.copies)
    if (contains(kDataAxes, grid.axes_of(axis))) copies *= grid.size({axis});
  return copies < grid.size(data_axes(grid));
}

bool any_cut_along_data(const TrainableParameters& parameters, const Grid& grid) {
  // By placements: a stage without any makes as many as the others.
  return std::any_of(parameters.placements.begin(), parameters.placements.end(), [&](const auto& placed) {
    return cut_along_data(sync_axes(placed.second, grid), grid);
  });
}

int most_shards(const TrainableParameters& parameters, const Grid& grid, const AxisSet& asked) {
  int most = 1;
  for (const auto* list : {static_cast<const std::vector<NamedParameter>*>(&parameters), &parameters.frozen})
    for (const NamedParameter& parameter : *list)
      most = std::max(most, grid.size(sharded_along(grid, parameter.sync, asked)));
  for (const auto& [name, placement] : parameters.placements)  // those of other stages: all follow one rule
    most = std::max(most, grid.size(sharded_along(grid, sync_axes(placement, grid), asked)));
  return most;
}

RankRoles::RankRoles(const Grid& grid, const SyncAxes& sync, const AxisSet& asked, int rank)
    : summed(sync.summed),
      sharded(sharded_along(grid, sync, asked)),
      replicate(without(sync.summed, sharded)),
      copy_(grid.place(sync.copies, rank)),
      copies_(grid.size(sync.copies)),
      shard_(grid.place(sharded, rank)),
      shards_(grid.size(sharded)),
      first_of_its_shard_(grid.place(without(sync.copies, sharded), rank) == 0) {}

HeldRanges RankRoles::held_ranges(std::int64_t numel, bool in_shards) const {
  if (!in_shards || shards_ == 1)
    return {.held = {0, numel}, .owned = owned_slice(numel, copy_, copies_), .sharded = {}};
  const Range held = owned_slice(numel, shard_, shards_);
  return {
      .held = held, .owned = first_of_its_shard_ ? held : Range{held.begin, held.begin}, .sharded = sharded};
}

RoleGroups::RoleGroups(const Mesh& mesh, const SyncAxes& sync, const AxisSet& asked)
    : roles(mesh.grid(), sync, asked, mesh.rank()),
      summed(mesh.along(roles.summed)),
      shard(mesh.along(roles.sharded)),
      replicate(mesh.along(roles.replicate)) {}

void Sharers::add(const Group& ranks) {
  const auto same = [&](const Group& one) { return one.name() == ranks.name(); };
  if (ranks.size() > 1 && std::none_of(groups_.begin(), groups_.end(), same)) groups_.push_back(ranks);
}

void Sharers::meet() {
  for (Group& ranks : groups_) ranks.barrier();
}

std::int64_t bytes_sent(const std::vector<Group>& groups) {
  std::set<std::string> seen;
  std::int64_t bytes = 0;
  for (const Group& group : groups)
    if (seen.insert(group.name()).second) bytes += group.traffic().bytes();
  return bytes;
}

}  // namespace isograd
