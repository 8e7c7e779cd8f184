// Data-parallel ranks must start from the same model: names, shapes, dtypes and values.
#pragma once

#include <vector>

#include "isograd/group.hpp"
#include "isograd/parameters.hpp"

namespace isograd {

// Collective. Throws ConfigError on every rank, naming the first parameter in which a rank differs from rank
// 0.
void check_same_parameters(const std::vector<NamedParameter>& parameters, Group& group,
                           bool compare_values = true);

}  // namespace isograd
