// Patterns of names.
#pragma once

#include <cstddef>
#include <string_view>

namespace isograd {

inline constexpr std::size_t kMostPattern = 1000;  // bytes: matching takes at most as many passes

// Whether the pattern, in which * stands for any text, matches the whole name. Not recursive: where the text
// after a star does not fit, that star takes one more character. An earlier star never needs more.
inline bool matches(std::string_view pattern, std::string_view name) {
  std::size_t at = 0, in_name = 0, behind_star = 0, taken_to = 0;
  bool has_star = false;
  while (in_name < name.size()) {
    if (at < pattern.size() && pattern[at] == '*') {
      has_star = true, behind_star = ++at, taken_to = in_name;
    } else if (at < pattern.size() && pattern[at] == name[in_name]) {
      ++at, ++in_name;
    } else if (has_star) {
      at = behind_star, in_name = ++taken_to;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', at) == std::string_view::npos;
}

}  // namespace isograd
