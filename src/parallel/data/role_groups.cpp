#include "parallel/data/role_groups.hpp"

#include <set>

namespace isograd {

RoleGroups::RoleGroups(const Mesh& mesh, const SyncAxes& sync, const AxisSet& asked)
    : roles(mesh.grid(), sync, asked, mesh.rank()),
      summed(mesh.along(roles.summed)),
      shard(mesh.along(roles.sharded)),
      replicate(mesh.along(roles.replicate)) {}

std::int64_t bytes_sent(const std::vector<Group>& groups) {
  std::set<std::string> seen;
  std::int64_t bytes = 0;
  for (const Group& group : groups)
    if (seen.insert(group.name()).second) bytes += group.traffic().bytes();
  return bytes;
}

}  // namespace isograd
