// What stage, options and the number of shards say of all buckets of a layout.
#pragma once

#include "isograd/data_parallel.hpp"

namespace isograd {

// Ranks that may keep shards of parameters that every rank has a copy of, along the axes `asked`.
int shards_of_copied(const Grid& grid, const AxisSet& asked, int rank);

// Of bucketed(). ConfigError: a stage that it does not have.
struct BucketRules {
  BucketRules(const DataParallelOptions& options, int shards);

  bool sharded = false;      // each rank of the shard group updates its shard
  bool one_copy = false;     // of the parameters, in memory that the shard group shares
  bool every_round = false;  // gradients of each micro-batch are reduced and dropped
};

}  // namespace isograd
