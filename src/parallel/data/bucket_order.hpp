// In which order a model's parameters fill the buckets.
#pragma once

#include <string>
#include <vector>

#include "isograd/group.hpp"
#include "isograd/parameters.hpp"

namespace isograd {

// Indices of `names` in `parameters`; empty where there are none. ConfigError unless each parameter is named
// once.
std::vector<std::size_t> order_by_names(const std::vector<NamedParameter>& parameters,
                                        const std::vector<std::string>& names);

// The order in which gradients came, `arrivals` (indices of `numel` parameters, perhaps not all), of the
// first rank that saw any, so that all ranks have the same; those that did not come last, in reverse. Empty
// where no rank saw any. Collective.
std::vector<std::size_t> agree_on_order(const std::vector<std::size_t>& arrivals, std::size_t parameters,
                                        Group& group);

}  // namespace isograd
