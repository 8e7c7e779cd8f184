// train.clip_groups: which parameters are clipped apart, and by which limits.
#pragma once

#include <string>
#include <vector>

#include "isograd/optimizer.hpp"
#include "isograd/parameters.hpp"
#include "train/config.hpp"

namespace isograd {

// ConfigError at `where`: a text that is not "PATTERN: LIMIT", a limit that is not above 0, a pattern twice.
std::vector<ClipGroup> clip_groups_of(const RunConfig& config, const std::string& where);

// ConfigError: a group that fits no trained parameter of `named`, a parameter that two groups fit.
void check_clip_groups(const RunConfig& config, const std::vector<std::pair<std::string, at::Tensor>>& named);

}  // namespace isograd
