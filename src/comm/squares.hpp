// A reduce-scatter that squares its output while it is in the cache, so that the norm needs no pass over
// memory.
#pragma once

#include <memory>
#include <optional>

#include "isograd/group.hpp"

namespace isograd {

// As group.reduce_scatter_async(output, input) with a sum. Once it is complete, `squares` is Σ x² over
// `output` in fp64, with the bits of squared_norm(output). It is shared because other ranks complete a
// reduction whose Pending was dropped. Returns nothing, and starts nothing, where this backend or type does
// not support it: square afterwards. Ranks need not agree on which of the two they call.
std::optional<Pending> reduce_scatter_with_squares(const Group& group, at::Tensor output, at::Tensor input,
                                                   std::shared_ptr<double> squares,
                                                   Group::Site site = Group::Site::current());

}  // namespace isograd
