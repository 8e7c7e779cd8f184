// Human-readable lists of whole numbers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

namespace isograd {

// Ascending, consecutive numbers joined: {8, 0, 1, 2} gives "0-2", "8".
inline std::vector<std::string> number_ranges(std::vector<int> numbers) {
  std::sort(numbers.begin(), numbers.end());
  std::vector<std::string> parts;
  for (std::size_t i = 0; i < numbers.size();) {
    std::size_t end = i + 1;
    while (end < numbers.size() && numbers[end] == numbers[end - 1] + 1) ++end;
    parts.push_back(std::to_string(numbers[i]));
    if (end - i > 1) parts.back() += "-" + std::to_string(numbers[end - 1]);
    i = end;
  }
  return parts;
}

}  // namespace isograd
