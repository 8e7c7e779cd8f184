#include "train/traffic.hpp"

#include <algorithm>

#include "isograd/fully_shard.hpp"
#include "parallel/data/rank_roles.hpp"

namespace isograd {

std::vector<SummedElements> summed_elements(DataParallel& layout, bool padded) {
  const Grid& grid = layout.mesh().grid();
  std::vector<SummedElements> result;
  for (const Bucket& bucket : layout.buckets()) {
    std::int64_t numel = 0;
    for (const Slot& slot : bucket.plan.slots) numel += slot.numel;
    result.push_back({.sync = bucket.plan.sync, .numel = padded ? bucket.plan.numel : numel, .whole = 0});
  }
  if (const auto* sharded = dynamic_cast<const FullySharded*>(&layout)) {
    // Experts are in other numbers of shards than all else; among those of one number it is all the same.
    std::int64_t dealt = sharded->whole_dealt_numel(), rest = sharded->whole_numel() - dealt;
    for (SummedElements& one : result) {
      std::int64_t& left = cut_along_data(one.sync, grid) ? dealt : rest;
      one.whole = std::min(left, one.numel);
      left -= one.whole;
    }
  }
  return result;
}

TrafficBytes traffic_bytes(const DataParallelPlan& plan, const std::vector<SummedElements>& elements,
                           const Grid& grid, const AxisSet& asked) {
  TrafficBytes sum;
  for (const SummedElements& one : elements) {
    const AxisSet sharded = sharded_along(grid, one.sync, asked);
    DataParallelPlan own = plan;
    own.numel = one.numel, own.whole = one.whole;
    own.dealt = own.dealt_whole = 0;
    own.shards = grid.size(sharded);
    own.replicas = grid.size(without(one.sync.summed, sharded));
    sum += traffic_bytes(own);
  }
  return sum;
}

}  // namespace isograd
