// The one reader of JSON: files from outside, and what peers say, are not trusted.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace isograd {

// No file that is read here nests deeper than ten; a value's own functions call themselves once a level.
inline constexpr std::size_t kDeepestJson = 100;
// Strings, numbers, lists and tables together: a value takes up to a hundred times the memory of its text.
inline constexpr std::size_t kMostJsonValues = std::size_t{1} << 24;

// Bytes of text. The largest that is read here, a tokenizer.json, has some ten million.
inline constexpr std::size_t kMostJsonBytes = std::size_t{1} << 30;

struct JsonRules {
  bool keys_once = true;  // a key twice would hide the first one; else the last counts
};

template <class Json>
struct ParsedJson {
  Json value;           // an object; null where there is a problem
  std::string problem;  // what was found instead of one, as an error's `found`; empty for sound text
};

// `text` as an object. Takes time and memory in proportion to the text, and stack in none. Problems: what is
// no JSON (with line and column), a byte-order mark, JSON of another type, a key twice, a number that no
// double holds, more bytes, levels or values than the limits above.
template <class Json = nlohmann::json>
ParsedJson<Json> parse_json(std::string_view text, JsonRules rules = {});
extern template ParsedJson<nlohmann::json> parse_json(std::string_view, JsonRules);
extern template ParsedJson<nlohmann::ordered_json> parse_json(std::string_view, JsonRules);

}  // namespace isograd
