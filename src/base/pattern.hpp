// Patterns of names.
#pragma once

#include <cstddef>
#include <string_view>

namespace isograd {

// Whether the pattern, in which * stands for any text, is the whole name.
inline bool matches(std::string_view pattern, std::string_view name) {
  if (pattern.empty()) return name.empty();
  if (pattern[0] != '*')
    return !name.empty() && name[0] == pattern[0] && matches(pattern.substr(1), name.substr(1));
  for (std::size_t skipped = 0; skipped <= name.size(); ++skipped)
    if (matches(pattern.substr(1), name.substr(skipped))) return true;
  return false;
}

}  // namespace isograd
