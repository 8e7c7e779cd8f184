// A rank among those that a flat buffer concerns, by role, from the axes that its parameters have in common.
// Integer arithmetic alone: what a layout makes groups of, and what can be said of one without any.
#pragma once

#include <vector>

#include "isograd/parameters.hpp"
#include "isograd/world.hpp"

namespace isograd {

// A rank's part of a flat buffer, in elements.
struct HeldRanges {
  Range held;         // its values, master and state
  Range owned;        // of these what the rank counts
  AxisSet sharded{};  // where not held whole: the axes along which the other parts lie (Bucket::sharded)
};

// Along which of the axes `asked` such a parameter is sharded: those that it is summed along, and factors of
// views of data axes (what is cut along one factor, experts along ep, shards along the other). ConfigError:
// an axis that is no data axis.
AxisSet sharded_along(const Grid& grid, const SyncAxes& sync, const AxisSet& asked);

// Whether ranks that see different data hold different parts of such a parameter: experts along ep.
bool cut_along_data(const SyncAxes& sync, const Grid& grid);

// Whether they do of some of these parameters, frozen or not, in this stage or another. Each then computes
// for the others' data, so that all must make as many forwards and backwards.
bool any_cut_along_data(const TrainableParameters& parameters, const Grid& grid);

// The most shards that any of these parameters has; 1 where nothing is sharded. After place_parameters().
int most_shards(const TrainableParameters& parameters, const Grid& grid, const AxisSet& asked);

struct RankRoles {
  // `asked`: axes along which ranks may keep shards, as sharded_along() takes them.
  RankRoles(const Grid& grid, const SyncAxes& sync, const AxisSet& asked, int rank);

  AxisSet summed;     // along which gradients add up
  AxisSet sharded;    // along which each rank may keep a shard, a part of `summed`
  AxisSet replicate;  // of `summed` those whose ranks keep the same shard

  int shards() const { return shards_; }
  // The rank's part of a buffer of `numel`. Held whole: a rank counts a slice over all copies. In shards: all
  // of its shard or nothing.
  HeldRanges held_ranges(std::int64_t numel, bool in_shards) const;

 private:
  int copy_, copies_;        // of the whole
  int shard_, shards_;       // along `sharded`
  bool first_of_its_shard_;  // among the ranks that keep the same one
};

// The groups of a flat buffer, by role, from the axes that its parameters have in common.
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
