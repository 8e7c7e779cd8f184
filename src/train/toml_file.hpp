// TOML from outside, for configurations and the planner's clusters.
#pragma once

#include <toml++/toml.h>
#include <string>
#include <string_view>

namespace isograd {

// ConfigError with file, line and column; for texts of more than 1 MiB, and keys of more than 100 parts.
toml::table parse_toml(std::string_view text, const std::string& file);
std::string describe(const toml::node& node);  // for `found`: "the integer 3"

}  // namespace isograd
