#include "parallel/data/role_groups.hpp"

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

RoleGroups::RoleGroups(const Mesh& mesh, const SyncAxes& sync, const AxisSet& asked)
    : sharded(sharded_along(mesh.grid(), sync, asked)),
      summed(mesh.along(sync.summed)),
      shard(mesh.along(sharded)),
      replicate(mesh.along(without(sync.summed, sharded))),
      copy_(mesh.place(sync.copies)),
      copies_(mesh.size(sync.copies)),
      first_of_its_shard_(mesh.place(without(sync.copies, sharded)) == 0) {}

Range RoleGroups::owned_of_whole(std::int64_t numel) const {
  return owned_slice(numel, copy_, copies_);
}

Range RoleGroups::owned_of_shard(Range held) const {
  return first_of_its_shard_ ? held : Range{held.begin, held.begin};
}

std::int64_t bytes_sent(const std::vector<Group>& groups) {
  std::set<std::string> seen;
  std::int64_t bytes = 0;
  for (const Group& group : groups)
    if (seen.insert(group.name()).second) bytes += group.traffic().bytes();
  return bytes;
}

}  // namespace isograd
