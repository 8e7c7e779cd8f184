// Drawing one token.
#pragma once

#include <cstdint>
#include <vector>

#include "isograd/model.hpp"

namespace isograd {

// From softmax(logits / temperature), among the top_k likeliest and, of those, the fewest that together have
// top_p. The random number is that of (options.seed, position). ConfigError when a logit is NaN or +∞.
std::uint32_t draw_token(const std::vector<double>& logits, const SampleOptions& options,
                         std::uint64_t position);

}  // namespace isograd
