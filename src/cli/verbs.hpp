// The verbs of the command line. Each function adds its verb and flags, and returns what runs when the verb
// is chosen; the status it returns is the program's (docs/errors.md).
#pragma once

#include <CLI/CLI.hpp>

#include <functional>
#include <string>
#include <vector>

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

Verb train_verb(CLI::App& program, const Invocation& invocation);
Verb verify_verb(CLI::App& program, const Invocation& invocation);
Verb compare_verb(CLI::App& program);
Verb sample_verb(CLI::App& program);
std::vector<Verb> bench_verbs(CLI::App& program, const Invocation& invocation);
std::vector<Verb> data_verbs(CLI::App& program);
Verb config_verb(CLI::App& program);
Verb launch_verb(CLI::App& program, const Invocation& invocation);
Verb layout_verb(CLI::App& program);
Verb schedule_verb(CLI::App& program);

}  // namespace isograd
