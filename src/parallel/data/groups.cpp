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

DataGroups hybrid_groups(const World& world, int replicas) {
  if (replicas < 1 || world.size % replicas != 0)
    throw ConfigError({.where = "replicas",
                       .found = fmt::format("{} for {} ranks", replicas, world.size),
                       .expected = "a number of 1 or more that divides the ranks",
                       .action = "Change the number of replicas or of ranks"});
  if (replicas == 1) return DataGroups(world.group);
  const int shards = world.size / replicas;
  const int replica = world.rank / shards, shard = world.rank % shards;
  std::vector<int> row, column;
  for (int i = 0; i < shards; ++i) row.push_back(replica * shards + i);
  for (int i = 0; i < replicas; ++i) column.push_back(i * shards + shard);
  return DataGroups(world.group, world.subgroup(row, fmt::format("dp_shard of replica {}", replica)),
                    world.subgroup(column, fmt::format("dp_replicate of shard {}", shard)));
}

}  // namespace isograd
