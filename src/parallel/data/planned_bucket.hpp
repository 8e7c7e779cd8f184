// The buckets that a layout will make on a rank, by the arithmetic that it makes them by: no groups, no
// memory, no values.
#pragma once

#include <string>
#include <vector>

#include "isograd/data_parallel.hpp"
#include "isograd/group.hpp"
#include "isograd/parameters.hpp"
#include "parallel/data/unit_plan.hpp"

namespace isograd {

struct PlannedBucket {
  BucketPlan plan;                    // padded
  std::string unit{};                 // that it belongs to (fully_shard)
  AxisSet asked{};                    // axes along which shards may lie, as RankRoles takes them
  bool in_shards = false;             // as RankRoles::held_ranges takes it
  bool parameters_in_shards = false;  // a rank keeps those of its share alone, or counts them of the one copy
  bool gradients_in_shards = false;
  at::ScalarType gradients = at::kFloat;  // their type
};

// The buckets of naive(), bucketed() and fully_shard() with the same arguments. Tensors may be on the meta
// device. ConfigError on placements that these would refuse by themselves.
std::vector<PlannedBucket> plan_naive(TrainableParameters parameters, const Grid& grid, int rank,
                                      const DataParallelOptions& options);
std::vector<PlannedBucket> plan_bucketed(TrainableParameters parameters, const Grid& grid, int rank,
                                         const DataParallelOptions& options);
// Frozen parameters are left out.
std::vector<PlannedBucket> plan_fully_sharded(const UnitHandle& root, const NamedTensors& named,
                                              const std::vector<UnitHandle>& blocks, const Grid& grid,
                                              int rank, const FullyShardOptions& options);

// Determined by the stage, the options and the numbers of shards for all buckets of a layout.
// For bucketed(). ConfigError: a stage that it does not have.
struct BucketRules {
  // `parameters` as place_parameters() leaves them.
  BucketRules(const DataParallelOptions& options, const TrainableParameters& parameters, const Grid& grid);

  bool sharded = false;  // each rank of a bucket's shard group, where it has others, updates its shard
  bool parameters_shared = false;         // of the parameters, in memory that the shard group shares
  bool reduces_each_micro_batch = false;  // gradients of each micro-batch are reduced and dropped
};

// In which order a model's parameters fill the buckets.
// Indices of `names` in `parameters`; empty where there are none. ConfigError unless each parameter is named
// once.
std::vector<std::size_t> order_by_names(const std::vector<NamedParameter>& parameters,
                                        const std::vector<std::string>& names);

// The order in which gradients came, `arrivals` (indices of `numel` parameters, perhaps not all), of the
// first rank that saw any, so that all ranks have the same; those that did not come last, in reverse. Empty
// where no rank saw any. Collective.
std::vector<std::size_t> agree_on_order(const std::vector<std::size_t>& arrivals, std::size_t parameters,
                                        Group& group);

}  // namespace isograd
