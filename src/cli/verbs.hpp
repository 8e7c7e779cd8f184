// The verbs of the command line. Each function adds its verb and flags, and returns what runs when the verb
// is chosen; the status it returns is the program's (docs/errors.md).
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "isograd/world.hpp"
#include "train/config.hpp"

namespace isograd {

// The command line of this process.
struct Invocation {
  std::vector<std::string> arguments;  // without the program's name
  std::vector<std::string> command;    // `launch`: the words after "--"
};

using Action = std::function<int()>;

struct Verb {
  CLI::App* app;
  Action run;
  bool leaves_files = false;  // the files repeat the output, so a closed output is no error
};

// Limits from this on only keep arithmetic from overflowing; help leaves them out.
inline constexpr double kNoLimit = 1e6;

// A number from `least` to `most`: a whole one unless `fractions`.
inline CLI::Validator between(double least, double most, bool fractions) {
  const std::string range = most >= kNoLimit ? fmt::format("at least {:.15g}", least)
                                             : fmt::format("{:.15g} to {:.15g}", least, most);
  return CLI::Validator(
      [=](const std::string& text) {
        double number = 0;
        std::int64_t whole = 0;
        bool read = CLI::detail::lexical_cast(text, number);
        if (!fractions) read = CLI::detail::lexical_cast(text, whole), number = static_cast<double>(whole);
        if (read && number >= least && number <= most) return std::string();
        return fmt::format("found \"{}\"; expected a {}number, {}", text, fractions ? "" : "whole ",
                           number > most ? fmt::format("at most {:.15g}", most) : range);
      },
      range);
}

// `type`: the name of its value; `least` < `most`: its range. A default is shown unless empty or 0; of a list
// each use gives one value.
template <typename Value>
CLI::Option* add_option(CLI::App& verb, const std::string& name, Value& value, const std::string& about,
                        const std::string& type = "", double least = 0, double most = 0) {
  CLI::Option* added = verb.add_option(name, value, about);
  if (!type.empty()) added->type_name(type);
  if constexpr (CLI::detail::is_mutable_container<Value>::value)
    added->allow_extra_args(false);
  else if constexpr (!requires { value.has_value(); })
    if (value != Value()) added->capture_default_str();
  if (least >= most) return added;
  return added->check(between(least, most, std::is_same_v<Value, double>));
}

// --json: the result as JSON in a file, next to the text that is printed; without a file, or with "-", on
// standard output in place of the text. The same of every verb that has it.
inline CLI::Option* takes_json(CLI::Option* option) {
  return option->expected(0, 1)->type_name("FILE")->default_str("-");
}
inline CLI::Option* add_json(CLI::App& verb, std::string& json, const std::string& what) {
  return takes_json(verb.add_option(
      "--json", json, "write " + what + " as JSON; without FILE, print the JSON in place of the text"));
}

// The words that shells complete an option's value with (texts.cpp), of which "<files>" stands for files.
CLI::Option* offers(CLI::Option* option, std::vector<std::string> words);

// The value is one of these words. `in_help`: which lists them.
inline CLI::Option* is_one_of(CLI::Option* option, const std::vector<std::string>& words,
                              bool in_help = true) {
  const std::string any = fmt::format("{}", fmt::join(words, ", "));
  option->check(CLI::Validator(
      [=](const std::string& word) {
        if (std::find(words.begin(), words.end(), word) != words.end()) return std::string();
        return fmt::format("found \"{}\"; expected one of {}", word, any);
      },
      in_help ? fmt::format("{{{}}}", fmt::join(words, ",")) : ""));
  return offers(option, words);
}

// A strategy's name, which may be another one's (strategy_of()). For an option with its own check.
inline CLI::Option* names_strategy(CLI::Option* option) {
  return option->transform(CLI::Validator(
      [](std::string& name) { return name = strategy_of(name), std::string(); }, /*description=*/""));
}

Verb train_verb(CLI::App& program, const Invocation& invocation);
Verb verify_verb(CLI::App& program, const Invocation& invocation);
Verb compare_verb(CLI::App& program);
Verb report_verb(CLI::App& program);
Verb sample_verb(CLI::App& program);
Verb export_verb(CLI::App& program);
std::vector<Verb> bench_verbs(CLI::App& program, const Invocation& invocation);
std::vector<Verb> data_verbs(CLI::App& program);
Verb config_verb(CLI::App& program);
Verb calibrate_verb(CLI::App& program, const Invocation& invocation);
Verb launch_verb(CLI::App& program, const Invocation& invocation);
Verb layout_verb(CLI::App& program);
Verb schedule_verb(CLI::App& program);
Verb plan_verb(CLI::App& program);
Verb serve_verb(CLI::App& program, const Invocation& invocation);
Verb completions_verb(CLI::App& program);

// Hidden: writes the file of texts that bin/isograd prints by itself.
Verb texts_verb(CLI::App& program);

// ---- help ----

// "isograd data pack".
std::string full_name(const CLI::App* app);
// As --help and isograd help print it.
std::string help_of(const CLI::App& app);
std::shared_ptr<CLI::FormatterBase> help_formatter();

// An option's names with their dashes, the name of its value as in "FILE.html", and more than its description
// says: values, default, whether it is required or may be repeated, and options that it needs or excludes.
std::vector<std::string> flags_of(const CLI::Option& option);
std::string type_of(const CLI::Option& option);
std::string facts_of(const CLI::Option& option);
bool takes_value(const CLI::Option& option);
bool is_repeatable(const CLI::Option& option);

// All verbs of the program as a page for `man`, in its macros man(7).
std::string man_page(const CLI::App& program);

// ---- verbs that run on several ranks ----

struct RunFlags {
  std::string config;
  std::optional<int> ranks;
  std::vector<std::string> sets;
  std::string device, backend;
  bool overwrite = false;             // for verbs that write a run's folder
  bool handles_user_signals = false;  // the verb handles SIGUSR1 and SIGUSR2, which wait until it does
};

void add_run_flags(CLI::App& verb, RunFlags& flags);

// Loads the file, then applies --device, --backend and --set, in this order.
RunConfig configuration(const RunFlags& flags, std::vector<std::string> more_sets = {});

// Runs `body` on every rank and returns the status. One rank runs in this process; for more it starts itself
// once per rank (through mpirun for "mpi"). Ranks of a launcher are recognised by their environment.
int on_ranks(const Invocation& invocation, const RunFlags& flags, const RunConfig& config,
             const std::function<int(World&)>& body);

// A checkpoint, a run's folder (its latest checkpoint), RUN/best (by validation loss), or a Hugging Face
// directory. ConfigError at `verb`.
std::filesystem::path find_model(const std::filesystem::path& given, const std::string& verb);

// This process's rank if there are several; nothing for a process on its own.
std::optional<int> rank_of_several();

}  // namespace isograd
