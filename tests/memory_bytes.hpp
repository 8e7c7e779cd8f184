// Bytes beside the formula's.
#pragma once

#include <cmath>
#include <cstdint>

namespace isograd {

// How far they are off, relative to what the formula says.
inline double off(std::int64_t found, std::int64_t expected) {
  return std::abs(static_cast<double>(found - expected)) / static_cast<double>(expected);
}

}  // namespace isograd
