// Reading a configuration: TOML and --set through the table, errors that name the place and the way out.
#include "train/config.hpp"

#include <fmt/format.h>
#include <toml++/toml.h>
#include <utf8.h>

#include <sstream>

#include "base/files.hpp"
#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "train/config_table.hpp"
#include "train/task_kind.hpp"

namespace isograd {
namespace {

constexpr const char* kReference = "docs/configuration.md lists every key (isograd config --markdown)";
constexpr std::size_t kLongestFile = 1 << 20;

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
  for (const auto& key : config_keys())
    if (key.name == name) return &key;
  return nullptr;
}

bool is_section(std::string_view name) {
  for (const auto& section : config_sections())
    if (section.name == name) return true;
  return false;
}

[[noreturn]] void unknown(const std::string& where, const std::string& name, bool table) {
  std::vector<std::string> candidates;
  if (table) {
    for (const auto& section : config_sections()) candidates.push_back(section.name);
  } else {
    for (const auto& key : config_keys()) candidates.push_back(key.name);
  }
  const auto near = nearest(name, candidates);
  const std::string section = name.substr(0, name.rfind('.') + 1);
  std::string known;
  for (const auto& candidate : candidates) {
    const bool here = table || (!section.empty() && candidate.rfind(section, 0) == 0 &&
                                candidate.find('.', section.size()) == std::string::npos);
    if (here) known += (known.empty() ? "" : ", ") + candidate.substr(table ? 0 : section.size());
  }
  std::string expected = table ? "one of the sections " + known
                         : !known.empty()
                             ? fmt::format("a key of [{}]: {}", section.substr(0, section.size() - 1), known)
                             : "section.key";
  refuse(where, fmt::format("an unknown {} \"{}\"", table ? "section" : "key", name), expected,
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

// The node as the alternative that `like` has, if it is one.
std::optional<ConfigValue> convert(const toml::node& node, const ConfigValue& like) {
  if (std::holds_alternative<bool>(like)) {
    if (auto value = node.as_boolean()) return value->get();
  } else if (std::holds_alternative<std::int64_t>(like)) {
    if (auto value = node.as_integer()) return value->get();
  } else if (std::holds_alternative<double>(like)) {
    if (auto value = node.as_floating_point()) return value->get();
    if (auto value = node.as_integer()) return static_cast<double>(value->get());
  } else if (std::holds_alternative<std::string>(like)) {
    if (auto value = node.as_string()) return value->get();
  } else if (auto list = node.as_array()) {
    std::vector<std::string> texts;
    for (const auto& entry : *list) {
      if (!entry.is_string()) return std::nullopt;
      texts.push_back(entry.as_string()->get());
    }
    return texts;
  }
  return std::nullopt;
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
  if (const TaskKind& kind = kind_of(config); kind.check) {
    try {
      kind.check(config);
    } catch (const ConfigError& error) {
      ErrorText text_of_shape = error.text();
      text_of_shape.where = where + ": " + text_of_shape.where;
      throw ConfigError(text_of_shape);
    }
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

std::vector<std::string> strategy_names() {
  return {std::begin(kStrategies), std::end(kStrategies)};
}

std::string to_toml(const RunConfig& config) {
  std::string text, section;
  for (const auto& key : config_keys()) {
    const auto dot = key.name.rfind('.');
    if (key.name.substr(0, dot) != section) {
      text += section.empty() ? "" : "\n";
      section = key.name.substr(0, dot);
      text += fmt::format("[{}]\n", section);
    }
    text += fmt::format("{} = {}\n", key.name.substr(dot + 1), toml_text(key.get(config)));
  }
  return text;
}

}  // namespace isograd
