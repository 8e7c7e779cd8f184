// Numbers in texts.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
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

// The number that the whole text is.
template <class Number>
std::optional<Number> number_in(std::string_view text) {
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return {};
  return number;
}

// The number of 0 or more that the text is, in digits and nothing else.
inline std::optional<std::int64_t> whole_number(std::string_view text) {
  return text.starts_with('-') ? std::nullopt : number_in<std::int64_t>(text);
}

}  // namespace isograd
