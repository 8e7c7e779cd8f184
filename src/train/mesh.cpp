// The axes of a configuration: which ranks see which packs, which parts of them, and where shards lie.
#include "train/build.hpp"

namespace isograd {

int stage_of(const std::string& strategy) {
  if (strategy == "zero1") return 1;
  if (strategy == "zero3") return 3;
  return strategy == "zero2" ? 2 : 0;
}

namespace {

ContextMeshOptions mesh_options(const RunConfig& config, const std::string& strategy) {
  return {.dp_replicate = stage_of(strategy) > 0 ? static_cast<int>(config.parallel.replicas) : 1,
          .ring = static_cast<int>(config.parallel.cp_ring),
          .ulysses = static_cast<int>(config.parallel.cp_ulysses),
          .fold = context_fold(config.parallel.cp_fsdp_mode)};
}

}  // namespace

DataGroups data_groups(const RunConfig& config, const std::string& strategy, const World& world) {
  if (stage_of(strategy) == 0) return DataGroups(world.group);
  if (context_ranks(config) == 1) return hybrid_groups(world, static_cast<int>(config.parallel.replicas));
  const ContextMesh mesh = context_mesh(world, mesh_options(config, strategy));
  return DataGroups(world.group, mesh.shard, mesh.replicate);
}

int count_replicas(const RunConfig& config, int ranks) {
  return stage_of(config.parallel.strategy) > 0 ? static_cast<int>(config.parallel.replicas)
                                                : packs_dealt_to(config, ranks);
}

int copies_of_shards(const RunConfig& config) {
  if (stage_of(config.parallel.strategy) == 0) return 1;
  const ContextFold fold = context_fold(config.parallel.cp_fsdp_mode);
  std::int64_t copies = config.parallel.replicas;
  if (fold == ContextFold::kNone || fold == ContextFold::kUlyssesOnly) copies *= config.parallel.cp_ring;
  if (fold == ContextFold::kNone || fold == ContextFold::kRingOnly) copies *= config.parallel.cp_ulysses;
  return static_cast<int>(copies);
}

ContextMesh make_mesh(const RunConfig& config, const World& world) {
  return context_mesh(world, mesh_options(config, config.parallel.strategy));
}

}  // namespace isograd
