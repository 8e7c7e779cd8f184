#include "parallel/data/role_groups.hpp"

#include <algorithm>
#include <set>

namespace isograd {

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
