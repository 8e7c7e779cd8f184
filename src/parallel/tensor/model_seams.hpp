// What models that ranks along tp hold together have in common: a stream of tokens, entered and left.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <string>

#include "isograd/model.hpp"
#include "isograd/tensor_parallel.hpp"

namespace isograd {

inline constexpr const char* kTensorAxis = "tp";

inline int ranks_along_tp(const Grid& grid) {
  return grid.has(kTensorAxis) ? grid.size({kTensorAxis}) : 1;
}

inline bool is_any_of(const std::string& name, std::initializer_list<const char*> parts) {
  return std::any_of(parts.begin(), parts.end(),
                     [&](const char* part) { return name.find(part) != std::string::npos; });
}

bool seams_are_checked();  // by check_seams()

// The seams of a stream of tokens; with sequence parallelism that of each rank along tp has some of them.
ModelSeams stream_seams(const Group& tp, const TensorParallelOptions& options);

}  // namespace isograd
