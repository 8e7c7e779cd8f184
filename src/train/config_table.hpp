// The one table of configuration keys: parsing, checking, writing out and documenting all read it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "isograd/group.hpp"
#include "train/config.hpp"

namespace isograd {

using ConfigValue = std::variant<bool, std::int64_t, double, std::string, std::vector<std::string>>;

// The allowed values of a key; bounds are inclusive unless marked.
struct Allowed {
  double least = -std::numeric_limits<double>::infinity();
  double most = std::numeric_limits<double>::infinity();
  bool above_least = false;  // least itself is refused
  bool below_most = false;   // most itself is refused
  std::vector<std::string> choices = {};
  bool not_empty = false;                                         // texts
  std::vector<std::pair<std::string, std::string>> aliases = {};  // other names of choices
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

  std::string section() const { return name.substr(0, name.rfind('.')); }
  std::string last_name() const { return name.substr(name.rfind('.') + 1); }
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

std::string toml_text(const ConfigValue& value);  // as written in a TOML file
// Why the value is refused, or nothing. The alternative is already the key's.
std::optional<std::string> refusal(const ConfigKey& key, const ConfigValue& value);

// The closest candidate, if one is near: a key of the same last name, then by edit distance.
std::optional<std::string> nearest(std::string_view text, const std::vector<std::string>& candidates);

// ConfigError if values contradict each other although each alone is allowed.
void check_together(const RunConfig& config, const std::string& where);

// ---- how keys are written ----

std::string on_one_line(std::string_view description);

namespace key_table {

// Limits from kNoLimit on only keep arithmetic from overflowing; the documentation leaves them out.
inline constexpr double kNoLimit = 1e6;
inline constexpr double kUnbounded = std::numeric_limits<double>::infinity();
inline constexpr double kManySteps = 1e15;    // far below where 64-bit counts could overflow
inline constexpr double kManyTokens = 1e9;    // of a pack or a batch
inline constexpr double kWide = 1 << 24;      // of a tensor's dim
inline constexpr double kManyRows = 1 << 30;  // of the embedding

// By the values of the two enums.
inline const std::vector<std::string> kScheduleKinds = {"constant", "cosine", "linear", "wsd"};
inline const std::vector<std::string> kDecayShapes = {"linear", "cosine", "1-sqrt"};
template <class Enum>
const std::vector<std::string>& choices_of() {
  return std::is_same_v<Enum, Schedule::Kind> ? kScheduleKinds : kDecayShapes;
}

template <class Field>
ConfigValue to_value(const Field& field) {
  if constexpr (std::is_enum_v<Field>)
    return choices_of<Field>()[static_cast<std::size_t>(field)];
  else if constexpr (std::is_same_v<Field, std::optional<double>>)
    return field.value_or(0);
  else
    return field;
}

template <class Field>
void from_value(Field& field, const ConfigValue& value) {
  if constexpr (std::is_enum_v<Field>)
    field = static_cast<Field>(std::ranges::find(choices_of<Field>(), std::get<std::string>(value)) -
                               choices_of<Field>().begin());
  else if constexpr (std::is_same_v<Field, std::optional<double>>)
    field = std::get<double>(value) == 0 ? std::nullopt : std::optional(std::get<double>(value));
  else
    field = std::get<Field>(value);
}

// `description` may go on in further lines: each break, with the blanks after it, becomes one blank.
template <auto kField>
ConfigKey make_key(std::string name, std::string unit, Allowed allowed, std::string_view description,
                   Ranks ranks = Ranks::kAlike) {
  return {.name = std::move(name),
          .unit = std::move(unit),
          .allowed = std::move(allowed),
          .description = on_one_line(description),
          .ranks = ranks,
          .get = [](const RunConfig& config) { return to_value(kField(config)); },
          .set = [](RunConfig& config, const ConfigValue& value) { from_value(kField(config), value); }};
}

template <auto kField>
ConfigKey make_key(std::string name, Allowed allowed, std::string_view description,
                   Ranks ranks = Ranks::kAlike) {
  return make_key<kField>(std::move(name), "", std::move(allowed), description, ranks);
}
template <auto kField>
ConfigKey make_key(std::string name, std::string_view description, Ranks ranks = Ranks::kAlike) {
  return make_key<kField>(std::move(name), "", {}, description, ranks);
}

// Defines a key. `path` is its field in RunConfig; KEY: its name too. Then, each where there is one, its unit
// and what is allowed, and its description.
#define NAMED_KEY(name, path, ...)                   \
  make_key < [](auto& c) -> auto& { return c.path; } \
  > (name, __VA_ARGS__)
#define KEY(path, ...) NAMED_KEY(#path, path, __VA_ARGS__)

inline Allowed at_least(double least, double most = kUnbounded) { return {.least = least, .most = most}; }
inline Allowed above(double least) { return {.least = least, .above_least = true}; }
inline Allowed fraction() { return {.least = 0, .most = 1, .below_most = true}; }
inline Allowed one_of(std::vector<std::string> choices) { return {.choices = std::move(choices)}; }
inline Allowed not_empty() { return {.not_empty = true}; }

}  // namespace key_table

// ---- kinds of runs ----

class Task;
class TaskModel;

// Value of batch.tokens_per_micro_batch for everything at once; the largest that a file may contain.
inline constexpr std::int64_t kAllTokens = 1'000'000'000;

struct TaskKind {
  const char* name;     // model.kind
  const char* samples;  // elements of a global batch: the key is batch.SAMPLES_per_step
  const char* tokens;   // parts of these, which batch.max_tokens_per_rank counts
  const char* smaller;  // human-readable keys that make a micro-batch smaller
  std::int64_t decltype(RunConfig::batch)::*per_step;         // the field of batch.SAMPLES_per_step
  std::int64_t decltype(RunConfig::batch)::*per_micro_batch;  // that of a micro-batch's size; null: none
  std::vector<ConfigKey> (*keys)();                           // its own, by section
  // Keys that have no effect in its runs, and its own keys, which have no effect in other runs.
  std::vector<UnusedKeys> unused{}, of_no_other{};
  // Checks of the configuration alone and for a number of ranks. ConfigError.
  void (*check)(const RunConfig& config){};
  void (*check_ranks)(const RunConfig& config, int ranks){};
  // The configuration and, if a rank has several samples, one that splits its part of the step differently:
  // into one micro-batch, or into one sample each. accumulation_text() names it: "2 to a micro-batch".
  std::vector<RunConfig> (*accumulations)(const RunConfig& config, int ranks);
  std::string (*accumulation_text)(const RunConfig& config);
  // The views of tp that the model's placements need. Null: none.
  Grid (*view)(const RunConfig& config, const Grid& grid){};
  // A run that a finished one is compared with, in a folder inside run.directory; nothing: none.
  std::optional<RunConfig> (*comparison)(const RunConfig& config) =
      [](const RunConfig&) -> std::optional<RunConfig> { return std::nullopt; };
  bool on_gpu = true;       // it supports GPUs
  bool cuts_tokens = true;  // parallel.sequence_parallel has an effect
  std::unique_ptr<Task> (*make)(const RunConfig& config, Group& group);
  // model_without_values() where it depends on no data; null: the task makes it.
  std::shared_ptr<TaskModel> (*model_without_values)(const RunConfig& config){};

  std::int64_t samples_per_step(const RunConfig& config) const { return config.batch.*per_step; }
};

const std::vector<const TaskKind*>& task_kinds();
const TaskKind& kind_of(const RunConfig& config);  // ConfigError where there is none of that name

// The kinds.
const TaskKind& text_kind();
const TaskKind& scorer_kind();
const TaskKind& video_kind();

}  // namespace isograd
