#include "base/json.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace isograd {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;
using ::testing::HasSubstr;

std::string problem(std::string_view text, JsonRules rules = {}) {
  const std::string first = parse_json(text, rules).problem;
  EXPECT_EQ(parse_json<ordered_json>(text, rules).problem, first);
  return first;
}

TEST(Json, IsReadAsTheLibraryReadsIt) {
  const std::string text =
      R"( {"b": [1, -2, 2.5e3, true, false, null, "\u00e9\n", {}, []], "a": {"x": 18446744073709551615}} )";
  const auto [value, problem] = parse_json(text);
  EXPECT_EQ(problem, "");
  EXPECT_EQ(value, json::parse(text));
  const auto ordered = parse_json<ordered_json>(text);
  EXPECT_EQ(ordered.problem, "");
  EXPECT_EQ(ordered.value.dump(), ordered_json::parse(text).dump());
  EXPECT_EQ(ordered.value.begin().key(), "b");
}

TEST(Json, DeepNestingIsRefused) {
  const auto nested = [](const std::string& open, const std::string& close, std::size_t levels) {
    std::string text = R"({"a":)";
    for (std::size_t i = 1; i < levels; ++i) text += open;
    text += "1";
    for (std::size_t i = 1; i < levels; ++i) text += close;
    return text + "}";
  };
  for (const auto& [open, close] : {std::pair{"[", "]"}, {R"({"b":)", "}"}}) {
    EXPECT_EQ(problem(nested(open, close, kDeepestJson)), "");
    EXPECT_EQ(problem(nested(open, close, kDeepestJson + 1)), "no JSON object: more than 100 levels");
    EXPECT_EQ(problem(nested(open, close, 1'000'000)), "no JSON object: more than 100 levels");
    EXPECT_EQ(problem(nested(open, "", 1'000'000)), "no JSON object: more than 100 levels");
  }
}

TEST(Json, WhatIsNoObjectIsSaid) {
  EXPECT_THAT(problem(""), HasSubstr("no JSON object (parse error at line 1, column 1"));
  EXPECT_THAT(problem("{\"a\": 1"), HasSubstr("no JSON"));
  EXPECT_THAT(problem("{\"a\":\n tru}"), HasSubstr("line 2, column 5"));
  EXPECT_THAT(problem("{} {}"), HasSubstr("no JSON"));
  EXPECT_THAT(problem("{\"a\": NaN}"), HasSubstr("no JSON"));
  EXPECT_THAT(problem("{\"a\": 1e400}"), HasSubstr("number overflow"));
  EXPECT_THAT(problem("{\"a\": \"\xff\"}"), HasSubstr("no JSON"));
  EXPECT_THAT(problem("// no\n{}"), HasSubstr("no JSON"));
  EXPECT_EQ(problem("\xEF\xBB\xBF{}"), "a byte order mark in front of the JSON");
  EXPECT_EQ(problem(std::string("{}\0{", 4)), "a zero byte");
  EXPECT_EQ(problem("[]"), "no JSON object, but JSON of type array");
  EXPECT_EQ(problem("3"), "no JSON object, but JSON of type number");
  // A problem may be long, but the message is not.
  EXPECT_LT(problem("{\"a\": " + std::string(100'000, 'x')).size(), 400u);
  EXPECT_LT(
      problem("{\"" + std::string(100'000, 'x') + "\": 1, \"" + std::string(100'000, 'x') + "\": 2}").size(),
      400u);
}

TEST(Json, AKeyTwiceIsRefusedOrTheLastCounts) {
  const std::string text = R"({"a": {"b": 1, "c": 2, "b": 3}, "b": 4})";
  EXPECT_EQ(problem(text), "the key \"b\" twice");
  EXPECT_EQ(parse_json(text, {.keys_once = false}).value, json::parse(R"({"a": {"b": 3, "c": 2}, "b": 4})"));
  EXPECT_EQ(parse_json<ordered_json>(text, {.keys_once = false}).value.dump(),
            R"({"a":{"b":3,"c":2},"b":4})");
  EXPECT_EQ(problem(R"([{"a": 1}, {"a": 1}])"),
            "no JSON object, but JSON of type array");  // of different objects
}

// Each key and value costs the same. With quadratic time this test would take most of an hour.
TEST(Json, ManyKeysTakeTimeInProportion) {
  std::string text = "{";
  for (int i = 0; i < 400'000; ++i)
    text += (i == 0 ? "\"k" : ",\"k") + std::to_string(i) + "\":{\"a\":[0,1]}";
  text += "}";
  EXPECT_EQ(parse_json(text).value.size(), 400'000u);
  EXPECT_EQ(parse_json<ordered_json>(text).value.size(), 400'000u);
}

TEST(Json, BytesAreLimited) {
  const char* text = "{}";  // refused by its size alone, before a byte is read
  EXPECT_EQ(parse_json({text, kMostJsonBytes + 1}).problem, "1073741825 bytes, more than 1073741824");
}

TEST(Json, ValuesAreLimited) {
  std::string text = "{\"a\":[";
  text.reserve(2 * kMostJsonValues + 10);
  for (std::size_t i = 0; i < kMostJsonValues; ++i) text += "0,";
  text += "0]}";
  EXPECT_EQ(parse_json(text).problem, "no JSON object: more than 16777216 values");
}

}  // namespace
}  // namespace isograd
