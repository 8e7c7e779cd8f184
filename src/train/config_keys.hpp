// Helpers for the files that contain a table of configuration keys.
#pragma once

#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "train/config_table.hpp"

namespace isograd::key_table {

inline constexpr double kUnbounded = std::numeric_limits<double>::infinity();
inline constexpr double kNoLimit =
    1e6;  // limits from here on only keep arithmetic from overflowing: left unsaid
inline constexpr double kManySteps = 1e15;    // far below where 64-bit counts could overflow
inline constexpr double kManyTokens = 1e9;    // of a pack or a batch
inline constexpr double kWide = 1 << 24;      // of a tensor's dim
inline constexpr double kManyRows = 1 << 30;  // of the embedding

inline const std::vector<std::string> kScheduleKinds = {"constant", "cosine"};

inline ConfigValue to_value(bool value) {
  return value;
}
inline ConfigValue to_value(std::int64_t value) {
  return value;
}
inline ConfigValue to_value(double value) {
  return value;
}
inline ConfigValue to_value(const std::string& value) {
  return value;
}
inline ConfigValue to_value(const std::vector<std::string>& value) {
  return value;
}
inline ConfigValue to_value(Schedule::Kind kind) {
  return kScheduleKinds[kind == Schedule::Kind::kConstant ? 0 : 1];
}
inline ConfigValue to_value(const std::optional<double>& value) {
  return value.value_or(0);
}

template <typename Field>
inline void from_value(Field& field, const ConfigValue& value) {
  field = std::get<Field>(value);
}
inline void from_value(Schedule::Kind& field, const ConfigValue& value) {
  field = std::get<std::string>(value) == "constant" ? Schedule::Kind::kConstant : Schedule::Kind::kCosine;
}
inline void from_value(std::optional<double>& field, const ConfigValue& value) {
  const double number = std::get<double>(value);
  field = number == 0 ? std::nullopt : std::optional(number);
}

template <auto kField>
ConfigKey make_key(std::string name, std::string unit, Allowed allowed, std::string description,
                   Ranks ranks = Ranks::kAlike) {
  return {.name = std::move(name),
          .unit = std::move(unit),
          .allowed = std::move(allowed),
          .description = std::move(description),
          .ranks = ranks,
          .get = [](const RunConfig& config) { return to_value(kField(config)); },
          .set = [](RunConfig& config, const ConfigValue& value) { from_value(kField(config), value); }};
}

// Defines a key. `path` is its field in RunConfig.
#define KEY(name, path, ...)        \
  make_key < [](auto& c) -> auto& { \
    return c.path;                  \
  }                                 \
  > (name, __VA_ARGS__)

inline Allowed any() {
  return {};
}
inline Allowed at_least(double least, double most = kUnbounded) {
  return {.least = least, .most = most};
}
inline Allowed above(double least) {
  return {.least = least, .above_least = true};
}
inline Allowed fraction() {
  return {.least = 0, .most = 1, .below_most = true};
}
inline Allowed one_of(std::vector<std::string> choices) {
  return {.choices = std::move(choices)};
}
inline Allowed not_empty() {
  return {.not_empty = true};
}

}  // namespace isograd::key_table
