// The help of the program and its verbs: CLI11's with the facts of an option behind its description, in
// words.
#include <fmt/ranges.h>

#include "base/output.hpp"
#include "cli/verbs.hpp"
#include "train/config_table.hpp"

namespace isograd {
namespace {

constexpr std::size_t kWidth = 100;  // on any terminal and in a file, so that it is the same text

// The words of `text` in lines, from the second on behind `indent` blanks.
std::string wrapped(const std::string& text, std::size_t indent) {
  std::string lines;
  std::size_t column = indent;
  for (const std::string& word : CLI::detail::split(on_one_line(text), ' ')) {
    const bool first = lines.empty(), fits = column + 1 + word.size() <= kWidth;
    if (!first) lines += fits ? " " : "\n" + std::string(indent, ' ');
    column = first || !fits ? indent + word.size() : column + 1 + word.size();
    lines += word;
  }
  return lines;
}

class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override {
    std::string text = CLI::Formatter::make_help(app, name, mode);
    while (text.find("\n\n\n") != std::string::npos) text.erase(text.find("\n\n\n"), 1);
    return text;
  }

  std::string make_option(const CLI::Option* option, bool is_positional) const override {
    const std::string facts = facts_of(*option);
    std::string names = option->get_name();
    if (!is_positional) names = fmt::format("{}", fmt::join(flags_of(*option), ","));
    const bool may_lack_value = option->get_items_expected_min() == 0;
    if (takes_value(*option) && !is_positional)
      names += may_lack_value ? " [" + type_of(*option) + "]" : " " + type_of(*option);
    return row(names, option->get_description() + (facts.empty() ? "" : " (" + facts + ")"));
  }

  std::string make_subcommand(const CLI::App* verb) const override {
    return row(verb->get_name(), verb->get_description());
  }

 private:
  std::string row(const std::string& left, const std::string& right) const {
    const std::size_t indent = get_column_width();
    const bool fits = left.size() + 3 <= indent;
    return "  " + left +
           (fits ? std::string(indent - 2 - left.size(), ' ') : "\n" + std::string(indent, ' ')) +
           wrapped(right, indent) + "\n";
  }
};

}  // namespace

std::vector<std::string> flags_of(const CLI::Option& option) {
  std::vector<std::string> flags;
  for (const std::string& name : option.get_snames()) flags.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) flags.push_back("--" + name);
  return flags;
}

bool takes_value(const CLI::Option& option) { return option.get_items_expected_max() > 0; }

bool is_repeatable(const CLI::Option& option) {
  return option.get_expected_max() >= CLI::detail::expected_max_vector_size;
}

std::string type_of(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  return type.substr(0, type.find(':'));
}

std::string facts_of(const CLI::Option& option) {
  std::vector<std::string> facts;
  if (takes_value(option)) {
    const std::string type = option.get_type_name(), value = option.get_default_str();
    std::string allowed = type.find(':') == std::string::npos ? "" : type.substr(type.find(':') + 1);
    if (allowed.starts_with('{'))
      allowed =
          fmt::format("{}", fmt::join(CLI::detail::split(allowed.substr(1, allowed.size() - 2), ','), ", "));
    if (!allowed.empty()) facts.push_back(allowed);
    if (!value.empty() && value != kStandardOutput) facts.push_back("default " + value);
    if (!option.get_positional() && option.get_required()) facts.push_back("required");
    if (!option.get_positional() && is_repeatable(option)) facts.push_back("may be repeated");
  }
  for (const CLI::Option* other : option.get_needs()) facts.push_back("only with " + other->get_name());
  for (const CLI::Option* other : option.get_excludes()) facts.push_back("not with " + other->get_name());
  return fmt::format("{}", fmt::join(facts, "; "));
}

std::string full_name(const CLI::App* app) {
  return app->get_parent() ? full_name(app->get_parent()) + " " + app->get_name() : app->get_name();
}

std::string help_of(const CLI::App& app) {
  return app.get_formatter()->make_help(&app, full_name(&app), CLI::AppFormatMode::Normal);
}

std::shared_ptr<CLI::FormatterBase> help_formatter() { return std::make_shared<HelpFormatter>(); }

}  // namespace isograd
