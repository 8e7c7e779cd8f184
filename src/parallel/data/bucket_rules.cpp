#include "parallel/data/bucket_rules.hpp"

#include "isograd/error.hpp"
#include "parallel/data/rank_roles.hpp"

namespace isograd {

BucketRules::BucketRules(const DataParallelOptions& options, const TrainableParameters& parameters,
                         const Grid& grid) {
  if (options.stage < 0 || options.stage > 2)
    throw ConfigError({.where = "stage",
                       .found = std::to_string(options.stage),
                       .expected = "0, 1 or 2",
                       .action = "Use fully_shard() for stage 3"});
  if (most_shards(parameters, grid, options.sharded) == 1) return;  // there is nothing to shard or to share
  one_copy = options.share_parameters;
  sharded = options.stage > 0 || one_copy;
  every_round = options.stage == 2 && !options.reduce_once;
}

}  // namespace isograd
