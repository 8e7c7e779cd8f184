// Reads a configuration (TOML and --set, through the table of keys), and writes it and its documentation.
#include "train/config.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <toml++/toml.h>
#include <utf8.h>

#include <algorithm>
#include <cmath>
#include <sstream>

#include "base/files.hpp"
#include "base/paths.hpp"
#include "base/print.hpp"
#include "base/refuse.hpp"
#include "train/config_table.hpp"

namespace isograd {
namespace {

constexpr const char* kReference = "docs/configuration.md lists every key (isograd config --markdown)";
constexpr std::size_t kLongestFile = 1 << 20;

// Quotes a text for TOML: unprintable characters by number; bytes that are not UTF-8 stay.
std::string quoted(const std::string& text) {
  std::string result = "\"";
  auto bad = utf8::find_invalid(text.begin(), text.end());
  for (auto at = text.begin(); at != text.end();) {
    if (at == bad) {
      result += *at++;
      bad = utf8::find_invalid(at, text.end());
      continue;
    }
    const auto begin = at;
    const std::uint32_t character = utf8::next(at, text.end());
    const std::string bytes(begin, at);
    if (bytes == "\"" || bytes == "\\")
      result += '\\' + bytes;
    else if (bytes == "\n" || bytes == "\t")
      result += bytes == "\n" ? "\\n" : "\\t";
    else
      result += printable(bytes) == bytes ? bytes : fmt::format("\\u{:04X}", character);
  }
  return result + '"';
}

std::string_view last_name(std::string_view name) { return name.substr(name.rfind('.') + 1); }

// toml++ limits the depth of nested values but not of dotted keys, and frees what it has read by recursion.
void check_keys(std::string_view text, const std::string& file) {
  constexpr int kLongestKey = 100;  // dots; no key has more than one
  int dots = 0;
  std::size_t line = 1;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '"' || c == '\'') {  // a string: one of several lines, or of one
      const std::string_view three = text.substr(i, 3);
      const bool several = three == "\"\"\"" || three == "\'\'\'";
      for (i += several ? 3 : 1; i < text.size(); ++i) {
        if (text[i] == '\n') ++line;
        if (text[i] == '\\' && c == '"')
          ++i;
        else if (several ? text.substr(i, 3) == three : text[i] == c || text[i] == '\n')
          break;
      }
      if (several) i += 2;
    } else if (c == '#') {
      i = std::min(text.find('\n', i), text.size()) - 1;
    } else if (c == '.') {
      if (++dots > kLongestKey)
        refuse(fmt::format("{}:{}", file, line), fmt::format("a key of more than {} parts", kLongestKey),
               "a key as docs/configuration.md lists them", "Fix that line");
    } else if (c != ' ' && c != '\t' && c != '_' && c != '-' &&
               !std::isalnum(static_cast<unsigned char>(c))) {
      dots = 0;
    }
    if (c == '\n') ++line;
  }
}

void check_length(std::size_t bytes, const std::string& file) {
  if (bytes > kLongestFile)
    refuse(file, fmt::format("{} bytes", bytes), fmt::format("a configuration of at most {}", kLongestFile),
           "Name a TOML file, such as examples/first_light.toml");
}

const ConfigKey* find_key(std::string_view name) {
  const auto found = std::ranges::find(config_keys(), name, &ConfigKey::name);
  return found == config_keys().end() ? nullptr : &*found;
}

bool is_section(std::string_view name) {
  return std::ranges::find(config_sections(), name, &ConfigSection::name) != config_sections().end();
}

[[noreturn]] void unknown(const std::string& where, const std::string& name, bool table) {
  const std::string section = table ? "" : name.substr(0, name.rfind('.') + 1);
  std::vector<std::string> candidates, known;  // known: in this section
  if (table)
    for (const auto& each : config_sections()) candidates.push_back(each.name);
  else
    for (const auto& each : config_keys()) candidates.push_back(each.name);
  for (const auto& each : candidates)
    if (table || (!section.empty() && each.starts_with(section) &&
                  each.find('.', section.size()) == std::string::npos))
      known.push_back(each.substr(section.size()));
  const std::string expected = table           ? "one of the sections {0}"
                               : known.empty() ? "section.key"
                                               : "a key of [{1}]: {0}";
  const auto near = nearest(name, candidates);
  refuse(where, fmt::format("an unknown {} \"{}\"", table ? "section" : "key", name),
         fmt::format(fmt::runtime(expected), fmt::join(known, ", "),
                     section.substr(0, section.empty() ? 0 : section.size() - 1)),
         near ? fmt::format("Did you mean \"{}\"? {}", *near, kReference) : kReference);
}

[[noreturn]] void wrong_value(const std::string& where, const ConfigKey& key, const std::string& found,
                              const std::string& text = {}) {
  const auto near = text.empty() ? std::nullopt : nearest(text, key.allowed.choices);
  refuse(where, found, allowed_text(key),
         near ? fmt::format("Did you mean \"{}\"? Change {}", *near, key.name)
              : fmt::format("Change {}; its default is {}", key.name, toml_text(key.get(RunConfig{}))));
}

std::string describe(const toml::node& node) {
  std::ostringstream text;
  if (auto value = node.as_string()) return "the text " + toml_text(value->get());
  if (auto value = node.as_integer()) return fmt::format("the integer {}", value->get());
  if (auto value = node.as_floating_point()) return "the number " + toml_text(value->get());
  if (auto value = node.as_boolean()) return value->get() ? "true" : "false";
  if (node.is_table()) return "a table";
  if (auto list = node.as_array()) {
    for (const auto& entry : *list)
      if (!entry.is_string()) return "a list that holds " + describe(entry);
    return "a list of texts";
  }
  return "a date or time";
}

// The node as the alternative that `like` has, if it is one. An integer is a number too.
std::optional<ConfigValue> convert(const toml::node& node, const ConfigValue& like) {
  return std::visit(
      [&]<class T>(const T&) -> std::optional<ConfigValue> {
        if constexpr (std::is_same_v<T, std::vector<std::string>>) {
          if (!node.is_array()) return std::nullopt;
          std::vector<std::string> texts;
          for (const auto& entry : *node.as_array()) {
            if (!entry.is_string()) return std::nullopt;
            texts.push_back(entry.as_string()->get());
          }
          return texts;
        } else {
          if (const auto* value = node.as<T>()) return ConfigValue(value->get());
          if (std::is_same_v<T, double> && node.is_integer())
            return ConfigValue(static_cast<double>(node.as_integer()->get()));
          return std::nullopt;
        }
      },
      like);
}

// File names end at a NUL, so a file other than the checked one would be opened.
bool has_nul(const ConfigValue& value) {
  const auto in = [](const std::string& text) { return text.find('\0') != std::string::npos; };
  if (const auto* text = std::get_if<std::string>(&value)) return in(*text);
  const auto* texts = std::get_if<std::vector<std::string>>(&value);
  return texts && std::any_of(texts->begin(), texts->end(), in);
}

void assign(RunConfig& config, const ConfigKey& key, const ConfigValue& value, const std::string& where) {
  if (has_nul(value)) wrong_value(where, key, "a text with a NUL (\\u0000) in it", "");
  if (auto found = refusal(key, value)) {
    auto text = std::get_if<std::string>(&value);
    wrong_value(where, key, *found, text ? *text : "");
  }
  key.set(config, value);
}

void read_table(RunConfig& config, const toml::table& table, const std::string& prefix,
                const std::string& file) {
  for (const auto& [key, node] : table) {
    const std::string name = prefix.empty() ? std::string(key.str()) : prefix + "." + std::string(key.str());
    const std::string where = fmt::format("{}:{}", file, key.source().begin.line);
    const bool dotted = key.str().find('.') != std::string_view::npos;  // a quoted key, not a path
    if (const ConfigKey* known = dotted ? nullptr : find_key(name)) {
      const auto value = convert(node, known->get(config));
      if (!value) wrong_value(where, *known, describe(node));
      assign(config, *known, *value, where + ": " + name);
    } else if (!dotted && is_section(name)) {
      if (!node.is_table())
        refuse(where, fmt::format("{} for \"{}\"", describe(node), name), "a section",
               fmt::format("Write [{}] on a line of its own, its keys below it", name));
      read_table(config, *node.as_table(), name, file);
    } else {
      unknown(where, name, node.is_table());
    }
  }
}

// One value in TOML; nothing if `text` is not exactly one.
std::optional<toml::table> parse_value(std::string_view text) {
  try {
    toml::table table = toml::parse(fmt::format("value = {}", text));
    if (table.size() == 1 && table.contains("value")) return table;
  } catch (const toml::parse_error&) {
  }
  return std::nullopt;
}

void apply_override(RunConfig& config, const std::string& text) {
  const std::string where = "--set " + text;
  const auto equals = text.find('=');
  if (equals == std::string::npos)
    refuse(where, "no \"=\"", "section.key=value", "Write it as in --set train.steps=100");
  const std::string name = text.substr(0, equals), value = text.substr(equals + 1);
  const ConfigKey* key = find_key(name);
  if (!key) unknown(where, name, false);
  if (!utf8::is_valid(value.begin(), value.end())) wrong_value(where, *key, "bytes that are not UTF-8");
  const ConfigValue like = key->get(config);
  const bool texts = std::holds_alternative<std::vector<std::string>>(like);
  const bool quoted = !value.empty() && (value.front() == '"' || value.front() == '\'');
  if (texts || std::holds_alternative<std::string>(like)) {
    // Shells take quotes away, so texts go without; a list goes as TOML or as its only entry.
    std::optional<ConfigValue> converted;
    const bool list = texts && !value.empty() && value.front() == '[';
    if (list || quoted)
      if (auto table = parse_value(value))
        converted = convert(*table->get("value"), list ? like : ConfigValue(""));
    if (list && !converted) wrong_value(where, *key, value);
    if (!converted) converted = value;
    if (texts && !list) {
      const auto& only = std::get<std::string>(*converted);
      converted = only.empty() ? std::vector<std::string>{} : std::vector<std::string>{only};
    }
    return assign(config, *key, *converted, where);
  }
  const auto table = parse_value(value);
  const auto converted = table ? convert(*table->get("value"), like) : std::nullopt;
  if (!converted) wrong_value(where, *key, table ? describe(*table->get("value")) : toml_text(value));
  assign(config, *key, *converted, where);
}

}  // namespace

RunConfig parse_config(std::string_view text, const std::string& file,
                       const std::vector<std::string>& overrides) {
  RunConfig config;
  check_length(text.size(), file);
  check_keys(text, file);
  try {
    const toml::table table = toml::parse(text, file);
    read_table(config, table, "", file);
  } catch (const toml::parse_error& error) {
    const auto at = error.source().begin;
    refuse(fmt::format("{}:{}:{}", file, at.line, at.column), std::string(error.description()),
           "TOML (https://toml.io)", "Fix that line");
  }
  for (const auto& override_text : overrides) apply_override(config, override_text);
  const std::string where = file.empty() ? "configuration" : file;
  check_together(config, where);
  try {
    if (const TaskKind& kind = kind_of(config); kind.check) kind.check(config);
  } catch (const ConfigError& error) {
    ErrorText text_of_shape = error.text();
    text_of_shape.where = where + ": " + text_of_shape.where;
    throw ConfigError(text_of_shape);
  }
  return config;
}

RunConfig load_config(const std::filesystem::path& file, const std::vector<std::string>& overrides) {
  std::string text;
  if (!file.empty()) {
    std::error_code failed;
    const auto size = std::filesystem::file_size(file, failed);
    if (!failed) check_length(size, file.string());
    text = read_file(file);
  }
  RunConfig config = parse_config(text, file.string(), overrides);
  config.source = file;
  return config;
}

std::string toml_text(const ConfigValue& value) {
  if (auto flag = std::get_if<bool>(&value)) return *flag ? "true" : "false";
  if (auto integer = std::get_if<std::int64_t>(&value)) return std::to_string(*integer);
  if (auto text = std::get_if<std::string>(&value)) return quoted(*text);
  if (auto texts = std::get_if<std::vector<std::string>>(&value)) {
    std::vector<std::string> list(texts->size());
    std::ranges::transform(*texts, list.begin(), quoted);
    return fmt::format("[{}]", fmt::join(list, ", "));
  }
  const double number = std::get<double>(value);
  const std::string text = fmt::format("{}", number);  // the shortest that reads back to the same bits
  const bool integral = std::isfinite(number) && text.find_first_of(".e") == std::string::npos;
  return integral ? text + ".0" : text;
}

std::optional<std::string> nearest(std::string_view text, const std::vector<std::string>& candidates) {
  std::optional<std::string> best;
  std::size_t least = near_enough(text) + 1;
  for (const auto& candidate : candidates) {
    // A right key in a wrong section is near. So many characters more cannot be within `least` edits.
    const bool same_key = last_name(candidate) == last_name(text) && candidate.find('.') != std::string::npos;
    const std::size_t longer = std::max(candidate.size(), text.size()),
                      shorter = candidate.size() + text.size() - longer;
    if (!same_key && longer - shorter >= least) continue;
    const std::size_t distance = same_key ? candidate != text : edit_distance(candidate, text);
    if (distance < least) {
      least = distance;
      best = candidate;
    }
  }
  return best;
}

std::vector<std::string> strategy_names() { return {std::begin(kStrategies), std::end(kStrategies)}; }

std::string to_toml(const RunConfig& config) {
  std::string text, section;
  for (const auto& key : config_keys()) {
    if (key.section() != section) {
      text += fmt::format("{}[{}]\n", section.empty() ? "" : "\n", key.section());
      section = key.section();
    }
    text += fmt::format("{} = {}\n", key.last_name(), toml_text(key.get(config)));
  }
  return text;
}

std::string configuration_markdown() {
  std::string text =
      "# Configuration\n\n"
      "A run is described by a TOML file; every key has a default, so the file holds only what "
      "differs. `--set section.key=value` on the command line overrides the file. Unknown "
      "keys, wrong types and impossible values are errors that name file, line, what is "
      "allowed and the nearest key.\n\n"
      "This page is generated from the table that parses the file: `isograd config --markdown "
      "> docs/configuration.md`. `isograd config CONFIG.toml` prints a file with every key "
      "written out.\n\n"
      "The ranks of a run must have the same configuration. Only keys marked *may differ* may "
      "have other values on other hosts: they name files, and what is in the files must still "
      "be the same.\n";
  for (const auto& section : config_sections()) {
    text += fmt::format("\n## [{}]\n\n{}\n\n| key | default | allowed | meaning |\n|---|---|---|---|\n",
                        section.name, section.description);
    for (const auto& key : config_keys()) {
      if (key.section() != section.name) continue;
      text += fmt::format("| `{}` | `{}` | {} | {} |\n", key.last_name(), toml_text(key.get(RunConfig{})),
                          allowed_text(key),
                          key.description + (key.ranks == Ranks::kMayDiffer ? " *May differ.*" : ""));
    }
  }
  return text;
}

}  // namespace isograd
