// The grid dp_replicate x dp_shard x cp_ring x cp_ulysses and its groups.
#include <fmt/format.h>

#include <array>

#include "isograd/context_parallel.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

enum Axis { kReplicate, kShard, kRing, kUlysses, kAxes };
using Coordinates = std::array<int, kAxes>;
using Along = std::array<bool, kAxes>;  // the axes along which a group's ranks differ

Coordinates coordinates(int rank, const Coordinates& sizes) {
  Coordinates result{};
  for (int axis = kAxes - 1; axis >= 0; --axis) {
    result[axis] = rank % sizes[axis];
    rank /= sizes[axis];
  }
  return result;
}

std::vector<int> members(int of, int world, const Coordinates& sizes, const Along& along) {
  const Coordinates own = coordinates(of, sizes);
  std::vector<int> ranks;
  for (int rank = 0; rank < world; ++rank) {
    const Coordinates other = coordinates(rank, sizes);
    bool together = true;
    for (int axis = 0; axis < kAxes; ++axis) together &= along[axis] || other[axis] == own[axis];
    if (together) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace

ContextFold context_fold(const std::string& name) {
  if (name == "all") return ContextFold::kAll;
  if (name == "ulysses_only") return ContextFold::kUlyssesOnly;
  if (name == "ring_only") return ContextFold::kRingOnly;
  if (name == "none") return ContextFold::kNone;
  throw ConfigError({.where = "parallel.cp_fsdp_mode",
                     .found = name,
                     .expected = "all, ulysses_only, ring_only or none",
                     .action = "Choose one of them"});
}

ContextMesh context_mesh(const World& world, const ContextMeshOptions& options) {
  const int inner = options.ring * options.ulysses, wanted = inner * options.dp_replicate;
  if (options.ring < 1 || options.ulysses < 1 || options.dp_replicate < 1 || world.size % wanted != 0) {
    std::string possible;
    for (int size = 1; size <= world.size; ++size)
      if (world.size % size == 0) possible += fmt::format("{}{}", possible.empty() ? "" : ", ", size);
    throw ConfigError({.where = "the mesh of ranks",
                       .found = fmt::format("dp_replicate {} x cp_ring {} x cp_ulysses {} for {} ranks",
                                            options.dp_replicate, options.ring, options.ulysses, world.size),
                       .expected = "sizes of 1 or more whose product divides the ranks: " + possible,
                       .action = "Change parallel.cp_ring, parallel.cp_ulysses, the replicas or the ranks"});
  }
  const Coordinates sizes{options.dp_replicate, world.size / wanted, options.ring, options.ulysses};
  const Coordinates own = coordinates(world.rank, sizes);
  const bool ring_folded = options.fold == ContextFold::kAll || options.fold == ContextFold::kRingOnly;
  const bool ulysses_folded = options.fold == ContextFold::kAll || options.fold == ContextFold::kUlyssesOnly;

  const auto group = [&](const char* name, const Along& along, bool may_be_world) {
    const auto ranks = members(world.rank, world.size, sizes, along);
    if (may_be_world && static_cast<int>(ranks.size()) == world.size) return world.group;
    return world.subgroup(ranks, fmt::format("{} of rank {}", name, ranks.front()));
  };
  ContextMesh mesh;
  mesh.dp_rank = own[kReplicate] * sizes[kShard] + own[kShard];
  mesh.dp_size = sizes[kReplicate] * sizes[kShard];
  // Groups of their own, though they may hold the same ranks as others: an exchange of attention in backward
  // is not ordered among the reductions that backward launches.
  mesh.context = group("cp", {false, false, true, true}, false);
  mesh.ring = group("cp_ring", {false, false, true, false}, false);
  mesh.ulysses = group("cp_ulysses", {false, false, false, true}, false);
  mesh.shard = group("shard", {false, true, ring_folded, ulysses_folded}, true);
  mesh.replicate = group("replicate", {true, false, !ring_folded, !ulysses_folded}, true);
  return mesh;
}

}  // namespace isograd
