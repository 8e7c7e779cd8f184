// The axis, and the hooks of a stream of tokens.
#pragma once

#include "isograd/tensor_parallel.hpp"
#include "model/hooks.hpp"

namespace isograd {

inline constexpr const char* kTensorAxis = "tp";

inline int ranks_along_tp(const Grid& grid) { return grid.has(kTensorAxis) ? grid.size({kTensorAxis}) : 1; }

// ConfigError: kTokens without sequence parallelism.
void check(const TensorParallelOptions& options);

// Column- and row-parallel products, and what surrounds them. ConfigError: what check() refuses.
TensorHooks stream_hooks(const Group& tp, const TensorParallelOptions& options);

}  // namespace isograd
