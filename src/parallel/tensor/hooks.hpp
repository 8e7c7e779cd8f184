// What the models of this room share: names of parameters, and the hooks of a stream of tokens.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <string>

#include "isograd/tensor_parallel.hpp"
#include "model/hooks.hpp"

namespace isograd {

inline constexpr const char* kTensorAxis = "tp";

inline int ranks_along_tp(const Grid& grid) {
  return grid.has(kTensorAxis) ? grid.size({kTensorAxis}) : 1;
}

inline bool is_any_of(const std::string& name, std::initializer_list<const char*> parts) {
  return std::any_of(parts.begin(), parts.end(),
                     [&](const char* part) { return name.find(part) != std::string::npos; });
}

bool tp_regions_are_checked();  // check_tp_regions()

// Column- and row-parallel products, and what surrounds them. ConfigError: kTokens without sequence parallelism.
TensorHooks stream_hooks(const Group& tp, const TensorParallelOptions& options);

}  // namespace isograd
