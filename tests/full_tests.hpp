// Whether a test goes through its whole matrix.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdlib>

namespace isograd {

inline bool full_tests() {
  const char* value = std::getenv("ISOGRAD_FULL_TESTS");
  return value && *value && *value != '0';
}

// Whether number `place` of a list takes the first of two values by turns. Not every other one, which would
// keep step with the loop that made the list: any two values of other loops come with both (Thue and Morse's
// sequence).
inline bool takes_first(std::size_t place) { return std::popcount(place) % 2 == 0; }

}  // namespace isograd
