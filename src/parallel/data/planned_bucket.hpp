// The buckets that a layout will make on a rank, by the arithmetic that it makes them by: no groups, no
// memory, no values.
#pragma once

#include <string>
#include <vector>

#include "isograd/data_parallel.hpp"
#include "parallel/data/unit_plan.hpp"

namespace isograd {

struct PlannedBucket {
  BucketPlan plan;                    // padded
  std::string unit{};                 // that it belongs to (fully_shard)
  AxisSet asked{};                    // axes along which shards may lie, as RankRoles takes them
  bool in_shards = false;             // as RankRoles::share takes it
  bool parameters_in_shards = false;  // a rank keeps those of its share alone, or counts them of the one copy
  bool gradients_in_shards = false;
  at::ScalarType gradients = at::kFloat;  // their type
};

// Of naive(), bucketed() and fully_shard() with the same arguments. Tensors may be on the meta device.
// ConfigError on placements that these would refuse by themselves.
std::vector<PlannedBucket> plan_naive(TrainableParameters parameters, const Grid& grid, int rank,
                                      const DataParallelOptions& options);
std::vector<PlannedBucket> plan_bucketed(TrainableParameters parameters, const Grid& grid, int rank,
                                         const DataParallelOptions& options);
// Of what is trained.
std::vector<PlannedBucket> plan_fully_sharded(const UnitHandle& root, const NamedTensors& named,
                                              const std::vector<UnitHandle>& blocks, const Grid& grid,
                                              int rank, const FullyShardOptions& options);

}  // namespace isograd
