// The groups of a flat buffer, by role, from the axes that its parameters have in common.
#pragma once

#include <vector>

#include "isograd/mesh.hpp"
#include "isograd/placement.hpp"

namespace isograd {

// Along which of the axes `asked` (of those that ranks may keep shards along) such a parameter is sharded.
AxisSet sharded_along(const Grid& grid, const SyncAxes& sync, const AxisSet& asked);

struct RoleGroups {
  // Collective over the ranks of each group. `asked`: axes along which ranks may keep shards. A factor of a
  // view of data axes is one of them: what is cut along one factor (experts along ep) shards along the other.
  // ConfigError: an axis that is no data axis.
  RoleGroups(const Mesh& mesh, const SyncAxes& sync, const AxisSet& asked);

  AxisSet sharded;  // along which each rank may keep a shard, a part of `summed`
  Group summed;     // whose gradients add up
  Group shard;      // along `sharded`
  Group replicate;  // of `summed` those that keep the same shard

  // Which elements of a buffer of `numel` this rank counts: of what is held whole a slice over all copies, of
  // a shard, `held`, all or nothing.
  Range owned_of_whole(std::int64_t numel) const;
  Range owned_of_shard(Range held) const;

 private:
  int copy_, copies_;        // of the whole
  bool first_of_its_shard_;  // among the ranks that keep the same one
};

// Sent by this rank in these groups, of which some may be the same.
std::int64_t bytes_sent(const std::vector<Group>& groups);

}  // namespace isograd
