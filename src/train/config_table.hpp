// The one table of configuration keys: parsing, checking, writing out and documenting all read it.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "train/config.hpp"

namespace isograd {

using ConfigValue = std::variant<bool, std::int64_t, double, std::string, std::vector<std::string>>;

// The allowed values of a key. Bounds of numbers are inclusive unless marked; texts with choices must be
// one of them.
struct Allowed {
  double least = -std::numeric_limits<double>::infinity();
  double most = std::numeric_limits<double>::infinity();
  bool above_least = false;  // least itself is refused
  bool below_most = false;   // most itself is refused
  std::vector<std::string> choices = {};
  bool not_empty = false;  // texts
};

// Whether ranks of one run may have different values of a key.
enum class Ranks { kAlike, kMayDiffer };  // kMayDiffer: where a host keeps its files

struct ConfigKey {
  std::string name;  // "section.key", "section.table.key"
  std::string unit;  // empty: none
  Allowed allowed;
  std::string description;
  Ranks ranks;
  ConfigValue (*get)(const RunConfig&);
  void (*set)(RunConfig&, const ConfigValue&);  // of the alternative that get() gives
};

const std::vector<ConfigKey>& config_keys();

// Keys that begin with `prefix` have no effect, except for `exceptions`.
struct UnusedKeys {
  std::string prefix;
  std::string reason;
  std::vector<std::string> exceptions = {};
};

struct ConfigSection {
  std::string name;
  std::string description;
};
const std::vector<ConfigSection>& config_sections();  // in the order of the documentation

std::string type_name(const ConfigValue& value);  // "integer", "list of texts", ...
std::string allowed_text(const ConfigKey& key);   // "integer, at least 1"; with what it may be
std::string toml_text(const ConfigValue& value);  // as written in a TOML file
// Why the value is refused, or nothing. The alternative is already the key's.
std::optional<std::string> refusal(const ConfigKey& key, const ConfigValue& value);

// The candidate closest to `text`: a key of the same last name first, then the smallest edit distance (with
// transpositions). Nothing when none is near.
std::optional<std::string> nearest(std::string_view text, const std::vector<std::string>& candidates);

// ConfigError if values contradict each other although each alone is allowed.
void check_together(const RunConfig& config, const std::string& where);

}  // namespace isograd
