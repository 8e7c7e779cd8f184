// Captures the error of a call, for tests.
#pragma once

#include <string>

#include "isograd/error.hpp"

namespace isograd::error_testing {

// The text of the error (of type Expected or derived), or "no error".
template <class Expected = ConfigError, class Call>
std::string error_of(Call&& call) {
  try {
    call();
  } catch (const Expected& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace isograd::error_testing
