// What stage, options and the numbers of shards say of all buckets of a layout.
#pragma once

#include "isograd/data_parallel.hpp"

namespace isograd {

// Of bucketed(). ConfigError: a stage that it does not have.
struct BucketRules {
  // `parameters` as place_parameters() leaves them.
  BucketRules(const DataParallelOptions& options, const TrainableParameters& parameters, const Grid& grid);

  bool sharded = false;  // each rank of a bucket's shard group, where it has others, updates its shard
  bool parameters_shared = false;         // of the parameters, in memory that the shard group shares
  bool reduces_each_micro_batch = false;  // gradients of each micro-batch are reduced and dropped
};

}  // namespace isograd
