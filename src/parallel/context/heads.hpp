// Whether Ulysses can split the heads of a model, for who asks before ranks start.
#pragma once

#include <cstdint>

namespace isograd {

// ConfigError unless it is one of possible_ulysses() (names the nearest ones).
void check_ulysses(std::int64_t size, std::int64_t heads, std::int64_t key_value_heads);

}  // namespace isograd
