// What the models of this room share: the axis, and the hooks of a stream of tokens.
#pragma once

#include "isograd/tensor_parallel.hpp"
#include "model/hooks.hpp"

namespace isograd {

inline constexpr const char* kTensorAxis = "tp";

inline int ranks_along_tp(const Grid& grid) { return grid.has(kTensorAxis) ? grid.size({kTensorAxis}) : 1; }

bool tp_regions_are_checked();  // check_tp_regions()

// Column- and row-parallel products, and what surrounds them. ConfigError: kTokens without sequence
// parallelism.
TensorHooks stream_hooks(const Group& tp, const TensorParallelOptions& options);

}  // namespace isograd
