// What a rank sends for gradients and parameters in a step, of a layout whose parameters differ in the axes
// along which they are summed and kept in shards: cut along tp, experts along ep, layers along pp.
#pragma once

#include <cstdint>
#include <vector>

#include "isograd/data_parallel.hpp"
#include "isograd/parameters.hpp"

namespace isograd {

// Elements of this rank with the same axes. `whole`: of these, what stage 3 gathers once for forward and
// backward together.
struct SummedElements {
  SyncAxes sync;
  std::int64_t numel = 0, whole = 0;
};

// By the axes of each bucket, with the padding of the flat storage or without it; of stage 3 also what stays
// whole as the layout says it.
std::vector<SummedElements> summed_elements(DataParallel& layout, bool padded);

// traffic_bytes() of each, with the shards and replicas that its axes make of the ranks of `grid`: `plan`
// says everything else. `asked`: axes along which shards may lie (sharded_axes()).
TrafficBytes traffic_bytes(const DataParallelPlan& plan, const std::vector<SummedElements>& elements,
                           const Grid& grid, const AxisSet& asked);

}  // namespace isograd
