// TrainingState as state.json, parsed as a file from outside.
#pragma once

#include <string>

#include "isograd/checkpoint.hpp"

namespace isograd {

std::string to_json(const TrainingState& state);
// ConfigError names `file` and the key that is missing or wrong.
TrainingState parse_state(const std::string& text, const std::string& file);

}  // namespace isograd
