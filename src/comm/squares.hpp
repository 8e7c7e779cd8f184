// A reduce-scatter that also squares what it writes, while that is in the cache: the norm costs no pass over
// memory.
#pragma once

#include <memory>
#include <optional>

#include "isograd/group.hpp"

namespace isograd {

// group.reduce_scatter_async(output, input), a sum. Once it is complete, `squares` is Σ x² over `output` in
// fp64, with the bits of squared_norm(output). Shared, because the ranks end a reduction whose Pending was
// dropped. Nothing, and nothing is begun, where this backend or type cannot: square afterwards. Ranks need
// not agree on which of the two they call.
std::optional<Pending> reduce_scatter_with_squares(const Group& group, at::Tensor output, at::Tensor input,
                                                   std::shared_ptr<double> squares,
                                                   Group::Site site = Group::Site::current());

}  // namespace isograd
