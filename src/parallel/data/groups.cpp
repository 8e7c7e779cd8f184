// The grid of replicas and shards.
#include <fmt/format.h>

#include "isograd/data_parallel.hpp"
#include "isograd/error.hpp"

namespace isograd {

DataGroups::DataGroups(Group group) : DataGroups(group, group, Group::solo()) {}

DataGroups::DataGroups(Group all_, Group shard_, Group replicate_)
    : all(std::move(all_)), shard(std::move(shard_)), replicate(std::move(replicate_)) {
  if (shard.size() * replicate.size() != all.size())
    throw ConfigError({.where = "data parallel groups",
                       .found = fmt::format("dp_replicate {} x dp_shard {} for {} ranks", replicate.size(),
                                            shard.size(), all.size()),
                       .expected = "sizes that multiply to the number of ranks",
                       .action = "Choose the number of replicas so that it divides the ranks"});
}

DataGroups data_groups(const Mesh& mesh, const AxisSet& sharded) {
  return DataGroups(mesh.along(kDataAxes), mesh.along(sharded), mesh.along(without(kDataAxes, sharded)));
}

DataGroups hybrid_groups(const World& world, int replicas) {
  return data_groups(Mesh(world, data_grid(world.size, {.dp_replicate = replicas})), {"dp_shard"});
}

}  // namespace isograd
