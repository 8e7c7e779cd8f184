// The only reader of JSON. Files from outside and texts of peers are not trusted.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace isograd {

// No file that isograd reads nests deeper than ten. The value's own functions recurse once per level.
inline constexpr std::size_t kDeepestJson = 100;
// Strings, numbers, lists and objects together. A value takes up to a hundred times the memory of its text.
inline constexpr std::size_t kMostJsonValues = std::size_t{1} << 24;
// Bytes of text. The largest file, a tokenizer.json, has about ten million.
inline constexpr std::size_t kMostJsonBytes = std::size_t{1} << 30;

struct JsonRules {
  bool keys_once = true;  // refuse a repeated key, which would hide the first value; else the last counts
};

template <class Json>
struct ParsedJson {
  Json value;           // an object; null on a problem
  std::string problem;  // the `found` part of an error; empty: no problem
};

// Parses `text` as an object. Time and memory are proportional to the text; the stack is constant. Problems:
// invalid JSON (with line and column), a byte order mark, JSON of another type, a repeated key, a number that
// no double holds, or more bytes, levels or values than the limits above.
template <class Json = nlohmann::json>
ParsedJson<Json> parse_json(std::string_view text, JsonRules rules = {});
extern template ParsedJson<nlohmann::json> parse_json(std::string_view, JsonRules);
extern template ParsedJson<nlohmann::ordered_json> parse_json(std::string_view, JsonRules);

// `value` as text. Invalid UTF-8, as in texts of peers and names of files, is replaced: it keeps nothing from
// being written or answered.
template <class Json = nlohmann::json>
std::string json_text(const Json& value, int indent = -1, bool ascii = false) {
  return value.dump(indent, ' ', ascii, Json::error_handler_t::replace);
}

// A value in a message: ASCII, cut short.
std::string brief(const nlohmann::json& value);

}  // namespace isograd
