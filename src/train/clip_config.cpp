#include "train/clip_config.hpp"

#include <fmt/format.h>

#include <charconv>
#include <cmath>

#include "base/pattern.hpp"
#include "base/refuse.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

std::string stripped(const std::string& text) {
  const auto first = text.find_first_not_of(" \t"), last = text.find_last_not_of(" \t");
  return first == std::string::npos ? "" : text.substr(first, last - first + 1);
}

}  // namespace

std::vector<ClipGroup> clip_groups_of(const RunConfig& config, const std::string& where) {
  std::vector<ClipGroup> groups;
  for (const std::string& text : config.train.clip_groups) {
    const auto refuse = [&](const std::string& what, const std::string& action) {
      isograd::refuse(where, fmt::format("train.clip_groups with \"{}\", {}", text, what),
                      "\"PATTERN: LIMIT\", as in \"*.experts.*: 0.5\"", action);
    };
    if (text.size() > kMostPattern)
      isograd::refuse(where, fmt::format("train.clip_groups with {} characters", text.size()),
                      fmt::format("at most {}", kMostPattern), "Shorten the pattern");
    const auto colon = text.rfind(':');
    if (colon == std::string::npos) refuse("which names no limit", "Write the limit behind a colon");
    const std::string pattern = stripped(text.substr(0, colon)), number = stripped(text.substr(colon + 1));
    if (pattern.empty()) refuse("which names no parameter", "Write a pattern before the colon");
    double limit = 0;
    const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), limit);
    if (error != std::errc() || end != number.data() + number.size() || !std::isfinite(limit) || limit <= 0)
      refuse("whose limit is no number above 0", "Give a norm above 0, or leave the group out");
    for (const ClipGroup& other : groups)
      if (other.pattern == pattern) refuse("a pattern that is there already", "Leave one of the two out");
    groups.push_back({pattern, limit});
  }
  return groups;
}

void check_clip_groups(const RunConfig& config,
                       const std::vector<std::pair<std::string, at::Tensor>>& named) {
  const std::vector<ClipGroup> groups = clip_groups_of(config, "train.clip_groups");
  std::vector<bool> used(groups.size(), false);
  for (const auto& [name, tensor] : named) {
    if (!tensor.requires_grad()) continue;
    const ClipGroup* first = nullptr;
    for (std::size_t i = 0; i < groups.size(); ++i) {
      if (!matches(groups[i].pattern, name)) continue;
      if (first)
        isograd::refuse("train.clip_groups",
                        fmt::format("{} in two groups, {} and {}", name, first->pattern, groups[i].pattern),
                        "each parameter in one group at most",
                        "Make the patterns such that they exclude one another");
      first = &groups[i];
      used[i] = true;
    }
  }
  for (std::size_t i = 0; i < groups.size(); ++i)
    if (!used[i])
      isograd::refuse("train.clip_groups",
                      fmt::format("{}, which fits no trained parameter", groups[i].pattern),
                      "patterns of names such as model.layers.0.mlp.up_proj.weight",
                      "Change it or leave it out; isograd layout lists the names");
}

}  // namespace isograd
