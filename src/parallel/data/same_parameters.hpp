// Data-parallel ranks must start from the same model: names, shapes, dtypes and values.
#pragma once

#include <vector>

#include "isograd/parameters.hpp"
#include "isograd/world.hpp"

namespace isograd {

// Compares parameters over the ranks that hold copies of them. Collective. Throws ConfigError on every rank
// of those, naming the first parameter in which a rank differs from the first one.
void check_same_parameters(const std::vector<NamedParameter>& parameters, const Mesh& mesh,
                           bool compare_values = true);

// The same of parameters that every rank of a group has a copy of.
void check_same_parameters(const std::vector<NamedParameter>& parameters, Group group,
                           bool compare_values = true);

// The ranks whose models have the same list of parameters, each its part of them: those of one stage.
Group ranks_of_same_parameters(const Mesh& mesh);

}  // namespace isograd
