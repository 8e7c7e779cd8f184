// What a UnitHandle knows once a layout has taken it.
#pragma once

#include "isograd/fully_shard.hpp"
#include "parallel/data/unit_node.hpp"

namespace isograd {

struct UnitHandle::Binding {
  std::function<std::vector<at::Tensor>()> parameters;
  std::optional<bool> checkpoint{}, reshard{}, fp32_gradients{};
  std::optional<at::ScalarType> output_dtype{};
  UnitCall call{};  // call.host is null: not taken
};

}  // namespace isograd
