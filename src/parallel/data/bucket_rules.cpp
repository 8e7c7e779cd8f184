#include "parallel/data/bucket_rules.hpp"
#include "base/refuse.hpp"

#include "isograd/error.hpp"
#include "parallel/data/rank_roles.hpp"

namespace isograd {

BucketRules::BucketRules(const DataParallelOptions& options, const TrainableParameters& parameters,
                         const Grid& grid) {
  if (options.stage < 0 || options.stage > 2)
    refuse("stage", std::to_string(options.stage), "0, 1 or 2", "Use fully_shard() for stage 3");
  if (most_shards(parameters, grid, options.sharded) == 1) return;  // there is nothing to shard or to share
  parameters_shared = options.share_parameters;
  sharded = options.stage > 0 || parameters_shared;
  reduces_each_micro_batch = options.stage == 2 && !options.reduce_once;
}

}  // namespace isograd
