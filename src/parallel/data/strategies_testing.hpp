// Every data-parallel strategy that works on flat buckets, for tests that hold for all of them.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/error_testing.hpp"
#include "isograd/data_parallel.hpp"
#include "isograd/error.hpp"

namespace isograd::testing {

struct Strategy {
  std::string name;
  int stage = 0;
  bool share = false, once = false;
  bool is_naive = false;

  // Over the shard group, so that there may be replicas as well.
  bool sharded() const { return stage > 0 || share; }

  std::unique_ptr<DataParallel> make(TrainableParameters parameters, const Mesh& mesh,
                                     DataParallelOptions options = {}) const {
    options.stage = stage;
    options.share_parameters = share;
    options.reduce_once = once;
    return is_naive ? naive(std::move(parameters), mesh, options)
                    : bucketed(std::move(parameters), mesh, options);
  }
};

inline const std::vector<Strategy>& strategies() {
  static const std::vector<Strategy> all = {
      {.name = "naive", .is_naive = true},
      {.name = "bucketed"},
      {.name = "zero1", .stage = 1},
      {.name = "zero2", .stage = 2},
      {.name = "zero2 once", .stage = 2, .once = true},
      {.name = "shared", .share = true},
      {.name = "shared zero2", .stage = 2, .share = true},
  };
  return all;
}

inline const Strategy& strategy_named(const std::string& name) {
  for (const Strategy& each : strategies())
    if (each.name == name) return each;
  throw std::invalid_argument("no strategy " + name);
}

using error_testing::error_of;

// The largest number of replicas, at most `most`, that divides the ranks.
inline int replicas_for(int size, int most) {
  for (int replicas = most; replicas > 1; --replicas)
    if (size % replicas == 0) return replicas;
  return 1;
}

// All ranks, as replicas of equally many shards.
inline Mesh mesh_of_replicas(const World& world, int replicas) {
  return Mesh(world, data_grid(world.size, {.dp_replicate = replicas}));
}

}  // namespace isograd::testing
