// Whether a test goes through its whole matrix.
#pragma once

#include <cstdlib>

namespace isograd {

inline bool full_tests() {
  const char* value = std::getenv("ISOGRAD_FULL_TESTS");
  return value && *value && *value != '0';
}

}  // namespace isograd
