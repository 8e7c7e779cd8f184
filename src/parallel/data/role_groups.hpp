// The groups of a flat buffer, by role, from the axes that its parameters have in common.
#pragma once

#include <vector>

#include "isograd/world.hpp"
#include "parallel/data/rank_roles.hpp"

namespace isograd {

struct RoleGroups {
  // Collective over the ranks of each group. `asked` as RankRoles takes it.
  RoleGroups(const Mesh& mesh, const SyncAxes& sync, const AxisSet& asked);

  RankRoles roles;  // of this rank
  Group summed;     // whose gradients add up
  Group shard;      // along roles.sharded
  Group replicate;  // of `summed` those that keep the same shard
};

// The groups of ranks that keep one copy of a buffer between them, each once: all ranks with the same copies
// add them in the same order.
class Sharers {
 public:
  void add(const Group& ranks);
  void meet();  // returns once all of them have come here

 private:
  std::vector<Group> groups_;
};

// Sent by this rank in these groups, of which some may be the same.
std::int64_t bytes_sent(const std::vector<Group>& groups);

}  // namespace isograd
