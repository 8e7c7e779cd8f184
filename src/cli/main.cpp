// The command line: verbs, and errors as exit statuses (docs/errors.md).
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <new>

#include "base/output.hpp"
#include "base/print.hpp"
#include "base/refuse.hpp"
#include "cli/verbs.hpp"
#include "comm/failures.hpp"
#include "comm/store.hpp"
#include "kernels/versions.hpp"
#include "train/config_table.hpp"
#include "train/other_names.hpp"
#include "train/rank_zero.hpp"

namespace isograd {
namespace {

constexpr int kBadInput = 2;

// The innermost verb that was chosen.
const CLI::App* chosen(const CLI::App& app) {
  const auto parsed = app.get_subcommands();
  return parsed.empty() ? &app : chosen(*parsed.front());
}

bool is_flag(const std::string& word) { return word.size() > 1 && word.front() == '-'; }

std::vector<std::string> verbs_of(const CLI::App& app) {
  std::vector<std::string> names;
  for (const auto* verb : app.get_subcommands([](const CLI::App*) { return true; }))
    if (!verb->get_group().empty()) names.push_back(verb->get_name());
  return names;
}

// "--set train.steps=30" for "train.steps=30" and, as torchtitan has it, "--training.steps 30"; "--set
// schedule.peak=0.1" for "--lr 0.1". Empty: no key.
std::string as_set(const std::string& word, const std::string& next) {
  const auto equals = word.find('=');
  std::string name = word.substr(0, equals);
  if (!is_flag(word) && (equals == std::string::npos || name.find('.') == std::string::npos)) return "";
  name.erase(0, name.find_first_not_of('-'));
  std::ranges::replace(name, '-', '_');
  std::vector<std::string> keys;
  for (const ConfigKey& key : config_keys()) keys.push_back(key.name);
  std::optional<std::string> key = our_key(name);
  if (!key && name.find('.') != std::string::npos) key = nearest(name, keys);
  if (!key) return "";
  return fmt::format("--set {}={}", *key,
                     equals != std::string::npos     ? word.substr(equals + 1)
                     : next.empty() || is_flag(next) ? "VALUE"
                                                     : next);
}

// The meaning of the first word that was not understood, by a guess; empty: none.
std::string meant(const CLI::App& app, const std::vector<std::string>& unknown) {
  const std::string name = unknown[0].substr(0, unknown[0].find('='));
  if (!is_flag(name) && unknown[0] == name) return nearest(name, verbs_of(app)).value_or("");
  static const std::pair<const char*, const char*> kOtherFlags[] = {
      {"--gpus", "--ranks"},           {"--nproc_per_node", "--ranks"},
      {"--nproc-per-node", "--ranks"}, {"--devices", "--ranks"},
      {"--num_processes", "--ranks"},  {"--world_size", "--ranks"},
      {"--world-size", "--ranks"},     {"-n", "--ranks"},
      {"--gpu", "--device cuda"}};
  const auto has = [&](const std::string& flag) {
    return app.get_option_no_throw(flag.substr(0, flag.find(' '))) != nullptr;
  };
  for (const auto& [theirs, ours] : kOtherFlags)
    if (name == theirs && has(ours)) return ours;
  if (has("--set"))
    if (auto set = as_set(unknown[0], unknown.size() > 1 ? unknown[1] : ""); !set.empty()) return set;
  std::vector<std::string> flags;
  for (const auto* option : app.get_options())
    for (const auto& each : option->get_lnames()) flags.push_back("--" + each);
  return nearest(name, flags).value_or("");
}

int bad_command_line(const CLI::App& program, const CLI::ParseError& error) {
  const CLI::App* app = chosen(program);
  std::vector<std::string> unknown = app->remaining();
  if (unknown.empty()) unknown = program.remaining(true);
  std::string text = error.what(), guess;
  if (!unknown.empty()) guess = meant(*app, unknown);
  if (!guess.empty()) guess = fmt::format(". Did you mean {}?", printable(guess));
  const std::vector<std::string> verbs = verbs_of(*app);
  if (dynamic_cast<const CLI::ExtrasError*>(&error))
    text = fmt::format("unknown argument{} {}{}", unknown.size() == 1 ? "" : "s",
                       printable(fmt::format("{}", fmt::join(unknown, " "))), guess);
  else if (dynamic_cast<const CLI::RequiredError*>(&error) && !verbs.empty())
    text =
        fmt::format("{}{}\nVerbs: {}", unknown.empty() ? "no verb" : "unknown verb " + printable(unknown[0]),
                    guess, fmt::join(verbs, ", "));
  else
    text = printable(text) + guess;
  print(stderr, fmt::format("isograd: {}\nSee {} --help.\n", text, full_name(app)));
  return kBadInput;
}

// Reports an error once: rank 0 one that all agreed on, its own rank one that others relay, the first rank
// one that several found alike (a lost rank; the others print what they waited for). A rank that may be alone
// prints its number.
void report(const std::exception& error) {
  const auto rank = rank_of_several();
  if (rank && *rank != 0 && dynamic_cast<const AgreedConfigError*>(&error)) return;
  const auto* relayed = dynamic_cast<const RelayedError*>(&error);
  if (rank && relayed && !relayed->of_operation()) return;
  const auto* lost = dynamic_cast<const PeerError*>(&error);
  if (rank && (relayed || !first_of_launch(lost ? "a rank is lost" : error.what()))) {
    if (lost)
      print(stderr, fmt::format("isograd: rank {} waited: {}\n", *rank, printable(lost->text().where)));
    return;
  }
  const bool alone = rank && !dynamic_cast<const AgreedConfigError*>(&error);
  std::string text = error.what();
  if (dynamic_cast<const std::bad_alloc*>(&error)) {
    text = "out of memory (" + text + ")";
  } else if (const auto* file = dynamic_cast<const fs::filesystem_error*>(&error)) {
    text = ConfigError(text_of(*file)).what();
  } else if (!dynamic_cast<const Error*>(&error)) {
    if (const auto* torch = dynamic_cast<const c10::Error*>(&error)) text = torch->what_without_backtrace();
    text = "an error that isograd did not foresee: " + text + "\nPlease report it with this message.";
  }
  // One write, so that the lines of several ranks do not mix.
  print(stderr,
        alone ? fmt::format("isograd: rank {}: {}\n", *rank, text) : fmt::format("isograd: {}\n", text));
}

Invocation read_arguments(int argc, char** argv) {
  Invocation invocation{.arguments = {argv + 1, argv + argc}, .command = {}};
  auto& arguments = invocation.arguments;
  if (!arguments.empty() && arguments.front() == "launch") {
    const auto end = std::find(arguments.begin(), arguments.end(), "--");
    if (end != arguments.end()) invocation.command.assign(end + 1, arguments.end());
    arguments.erase(end, arguments.end());
  }
  return invocation;
}

// Opens descriptors 0 to 2 if they were closed (`>&-`): the next opened file would get what is printed.
void hold_standard_descriptors() {
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(descriptor, F_GETFD) < 0 && errno == EBADF)
      (void)::open("/dev/null", descriptor == STDIN_FILENO ? O_WRONLY : O_RDONLY);
}

// Standard output is closed, or a pipe or terminal whose other end has gone. A full disk is for
// require_output().
bool nobody_reads() {
  pollfd output{STDOUT_FILENO, POLLOUT, 0};
  const int flags = ::fcntl(STDOUT_FILENO, F_GETFL);
  return flags < 0 || (flags & O_ACCMODE) == O_RDONLY ||
         (::poll(&output, 1, 0) == 1 && (output.revents & (POLLERR | POLLHUP | POLLNVAL)) != 0);
}

// ConfigError unless all was written: a full disk must not look like success. Only the stream knows by now.
void require_output() {
  std::cout.flush();
  errno = 0;
  if (std::fflush(stdout) == 0 && !std::ferror(stdout) && std::cout) return;
  refuse("standard output", errno != 0 ? std::strerror(errno) : "output that could not be written",
         "a place to write to", "Send the output elsewhere, or free space there");
}

Verb help_verb(CLI::App& program) {
  CLI::App* verb = program.add_subcommand("help", "Print the help of isograd or of one of its verbs");
  const auto words = std::make_shared<std::vector<std::string>>();
  const auto man = std::make_shared<bool>();
  offers(verb->add_option("VERB", *words,
                          "a verb, as in isograd help data pack; without one, the help of isograd itself"),
         verbs_of(program));
  verb->add_flag("--man", *man, "print all verbs as a page for man: isograd help --man | man -l -");
  const auto action = [&program, words, man] {
    if (*man) return print(stdout, man_page(program)), 0;
    const CLI::App* app = &program;
    for (const std::string& word : *words) {
      const std::vector<std::string> verbs = verbs_of(*app);
      const bool known = std::ranges::find(verbs, word) != verbs.end();
      if (!known && verbs.empty()) refuse(full_name(app), word, "no more words", "Leave it out");
      const auto near = nearest(word, verbs);
      if (!known)
        refuse("isograd help", "an unknown verb " + word, fmt::format("one of {}", fmt::join(verbs, ", ")),
               near ? fmt::format("Did you mean {}?", *near) : "Choose one of them");
      app = app->get_subcommand(word);
    }
    print(stdout, help_of(*app));
    return 0;
  };
  return {verb, action};
}

// Every verb has them, and the program in front of its verb.
void add_output_flags(CLI::App& app) {
  const auto grouped = [](CLI::Option* option) { return option->group("Output"); };
  CLI::Option* quiet = grouped(app.add_flag(
      "-q,--quiet", printing().quiet, "print results, warnings and errors only: no progress and no notices"));
  grouped(app.add_flag("-v,--verbose", printing().verbose,
                       "print a line for each step or part instead of redrawing one progress line"))
      ->excludes(quiet);
  is_one_of(grouped(app.add_option(
                        "--color", printing().colour,
                        "color PASS and FAIL: auto (on a terminal, unless NO_COLOR is set), always or never"))
                ->type_name("WHEN")
                ->take_last(),
            {"auto", "always", "never"}, /*in_help=*/false);
  for (CLI::App* verb : app.get_subcommands([](const CLI::App*) { return true; })) add_output_flags(*verb);
}

int run(int argc, char** argv) {
  const Invocation invocation = read_arguments(argc, argv);
  CLI::App program("Distributed training with exactly the gradient of one device, and the proof of it.",
                   "isograd");
  program.set_version_flag("-V,--version", "isograd " ISOGRAD_VERSION ", LibTorch " ISOGRAD_LIBTORCH);
  program.formatter(help_formatter());
  program.require_subcommand(1);
  program.footer(
      "isograd help VERB prints the options of a verb. Exit status: 0 done; 1 the requested work failed;\n"
      "2 bad input; 3 a rank was lost; 4 a defect of isograd; 75 saved, run it again; 128 + n ended by\n"
      "signal n (docs/errors.md).");
  std::vector<Verb> verbs = {train_verb(program, invocation),
                             verify_verb(program, invocation),
                             compare_verb(program),
                             report_verb(program),
                             sample_verb(program),
                             export_verb(program),
                             config_verb(program),
                             layout_verb(program),
                             schedule_verb(program),
                             calibrate_verb(program, invocation),
                             plan_verb(program),
                             serve_verb(program, invocation),
                             launch_verb(program, invocation),
                             completions_verb(program),
                             texts_verb(program)};
  for (auto& more : {data_verbs(program), bench_verbs(program, invocation)})
    verbs.insert(verbs.end(), more.begin(), more.end());
  verbs.push_back(help_verb(program));
  add_output_flags(program);
  try {
    std::vector<std::string> backwards(invocation.arguments.rbegin(), invocation.arguments.rend());
    program.parse(backwards);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) {  // --help, --version
      program.exit(error);
      require_output();
      return 0;
    }
    return bad_command_line(program, error);
  }
  for (const auto& verb : verbs)
    if (verb.app->parsed()) {
      kernels::processor_level();  // a wrong ISOGRAD_PROCESSOR is named here, before there are ranks
      const int status = verb.run();
      if (!verb.leaves_files || !nobody_reads()) require_output();
      return status;
    }
  throw_broken_invariant("a verb", "none", __FILE__, __LINE__);
}

// Runs last in exit() and ends the process: LibTorch would take 80 ms to free its tables, a quarter of a
// command's start. Handlers registered later, such as MPI's, have run.
[[maybe_unused]] void end_at_once(int status, void*) {
  std::cout.flush();
  std::fflush(nullptr);
  std::_Exit(status);
}

// Not with a preloaded library (a profiler), which may write its results at exit, nor with sanitizers.
void skip_taking_down() {
#if !defined(ISOGRAD_SANITIZE_ADDRESS) && !defined(ISOGRAD_SANITIZE_THREAD)
  if (!std::getenv("LD_PRELOAD")) ::on_exit(end_at_once, nullptr);
#endif
}

}  // namespace
}  // namespace isograd

int main(int argc, char** argv) {
  isograd::hold_standard_descriptors();
  isograd::skip_taking_down();
  try {
    return isograd::run(argc, argv);
  } catch (const std::exception& error) {
    isograd::report(error);
    return isograd::exit_status(error);
  }
}
