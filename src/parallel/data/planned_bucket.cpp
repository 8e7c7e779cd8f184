#include "parallel/data/planned_bucket.hpp"

#include "layout/flat.hpp"
#include "parallel/data/bucket_order.hpp"
#include "parallel/data/bucket_rules.hpp"

namespace isograd {
std::vector<PlannedBucket> plan_naive(TrainableParameters parameters, const Grid& grid, int rank,
                                      const DataParallelOptions& options) {
  place_parameters(parameters, grid, rank);
  std::vector<PlannedBucket> result;
  for (BucketPlan& plan : plan_buckets(parameters, options.bucket_bytes)) {
    PlannedBucket& bucket = result.emplace_back();
    bucket.gradients = gradient_type(plan.dtype, options.fp32_gradients);
    bucket.plan = std::move(plan);
  }
  return result;
}

std::vector<PlannedBucket> plan_bucketed(TrainableParameters parameters, const Grid& grid, int rank,
                                         const DataParallelOptions& options) {
  place_parameters(parameters, grid, rank);
  const BucketRules rules(options, parameters, grid);
  std::vector<PlannedBucket> result;
  for (BucketPlan& plan : plan_buckets(parameters, options.bucket_bytes, options.first_bucket_bytes,
                                       order_by_names(parameters, options.order))) {
    pad_for(plan, grid.size(plan.sync.summed));
    PlannedBucket& bucket = result.emplace_back();
    bucket.asked = options.sharded;
    bucket.in_shards = rules.sharded;
    bucket.parameters_in_shards = rules.parameters_shared;
    bucket.gradients_in_shards = rules.reduces_each_micro_batch;
    bucket.gradients = gradient_type(plan.dtype, options.fp32_gradients);
    bucket.plan = std::move(plan);
  }
  return result;
}

std::vector<PlannedBucket> plan_fully_sharded(const UnitHandle& root, const NamedTensors& named,
                                              const std::vector<UnitHandle>& blocks, const Grid& grid,
                                              int rank, const FullyShardOptions& options) {
  std::vector<PlannedBucket> result;
  for (UnitPlan& unit : plan_units(unit_uses(root, blocks), named,
                                   unit_members(named, options.placements, grid, rank), options, grid))
    for (auto& [plan, trained] : unit.flats) {
      if (!trained) continue;
      PlannedBucket& bucket = result.emplace_back();
      bucket.unit = unit.name;
      bucket.asked = options.sharded;
      bucket.in_shards = bucket.parameters_in_shards = true;
      bucket.gradients_in_shards = !options.reduce_once;
      bucket.gradients = gradient_type(plan.dtype, unit.fp32_gradients);
      bucket.plan = std::move(plan);
    }
  return result;
}

}  // namespace isograd
