// Comparisons between ranks before and between steps.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "isograd/group.hpp"
#include "isograd/parameters.hpp"

namespace isograd {

// ConfigError on every rank that names the first parameter whose placement differs between ranks, and the
// difference. Collective.
void check_same_placements(const std::vector<std::pair<std::string, Placement>>& placements, Group group);

// [tensors.size()] of int64: of each tensor's type, shape and bits.
at::Tensor checksums(const std::vector<at::Tensor>& tensors);

}  // namespace isograd
