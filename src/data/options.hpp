// Checks of options for loaders and stores.
#pragma once

#include <fmt/format.h>

#include "base/refuse.hpp"
#include "isograd/error.hpp"

namespace isograd {

// ConfigError with the key's name unless the number is in the range. NaN is not.
template <typename Number>
void in_range(const char* key, Number value, Number least, Number most) {
  if (!(value >= least && value <= most))
    refuse(key, fmt::format("{}", value), fmt::format("{} to {}", least, most), "Correct the value");
}

}  // namespace isograd
