// isograd verify: is the gradient of this layout the gradient of one device?
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <filesystem>

#include "base/files.hpp"
#include "base/output.hpp"
#include "base/print.hpp"
#include "base/refuse.hpp"
#include "base/shell.hpp"
#include "base/waiting.hpp"
#include "cli/verbs.hpp"
#include "serve/verify/verify_server.hpp"
#include "train/device.hpp"
#include "verify/present.hpp"
#include "verify/run.hpp"

namespace isograd {
namespace {

struct VerifyFlags : RunFlags {
  std::vector<std::string> layouts;
  std::string json, report, dump, minimise, server, key_file, base;
  bool adapters = false;
};

// Why a name is refused; empty when it is not.
std::string no_such_layout(const std::string& name) {
  try {
    if (name != kAllLayouts && name != kAllMeshes) parse_layout(name);
  } catch (const ConfigError& error) {
    const auto& [where, found, expected, action] = error.text();
    return fmt::format("found \"{}\". {}{} Expected {}", found, action, action.ends_with('?') ? "" : ".",
                       expected);
  }
  return {};
}

// The smallest configuration that still fails, as a file.
int minimise_verb(const VerifyFlags& flags, const RunConfig& config) {
  const int ranks = flags.ranks.value_or(1);
  if (rank_of_several())
    refuse("--minimise", "a launcher that has started several ranks",
           "one process: it starts ranks of its own, as many as each trial needs",
           "Start it without a launcher, with --ranks");
  if (!flags.json.empty() || !flags.report.empty() || !flags.dump.empty())
    refuse("--minimise", "--json, --report or --dump with it",
           "none: it makes many verdicts and writes a configuration", "Verify the file that it writes");
  if (device_kind(config) != "cpu")
    refuse("--minimise", fmt::format("parallel.device = \"{}\"", config.parallel.device),
           "\"cpu\": its ranks are threads, and threads on one GPU would wait for one another",
           "Add --device cpu");
  check(config, ranks);
  std::optional<Waiting> waiting(std::in_place, "trial", 0);
  const auto found = minimise_run(config, ranks, flags.layouts, [&](VerifyProblem& problem, World& world) {
    if (world.rank == 0) waiting->begin(fmt::format("{} on {} ranks", problem.layouts[0].name, world.size));
  });
  waiting.reset();
  if (!found) {
    print(stdout,
          "nothing to minimise: every layout asked for has the gradient of one device, on ranks that are "
          "threads\n");
    return 0;
  }
  write_file(flags.minimise, minimised_toml(*found, flags.minimise));
  std::string text = fmt::format("{}; smallest configuration after {} trials: {}\n",
                                 printable(found->failure), found->tried, printable(flags.minimise));
  for (const auto& change : found->changes) text += "  " + printable(change) + "\n";
  print(stdout, text + printable(verify_command(flags.minimise, found->trial.ranks)) + "\n");
  return 1;
}

// A running training server.
int server_verb(const VerifyFlags& flags) {
  const char* given = std::getenv("TINKER_API_KEY");
  std::string key = given ? given : "";
  if (!flags.key_file.empty()) {
    key = read_file(flags.key_file, 4096);
    while (!key.empty() && std::isspace(static_cast<unsigned char>(key.back()))) key.pop_back();
  }
  const serve::ServerVerdict verdict =
      serve::verify_server(flags.server, key, flags.base, serve::judged_models(flags.adapters));
  print_verdict(stdout,
                to_text(verdict) + (flags.adapters ? "  left out: whole weights (--adapters)\n" : ""));
  return verdict.passed() ? 0 : 1;
}

}  // namespace

Verb verify_verb(CLI::App& program, const Invocation& invocation) {
  CLI::App* verb = program.add_subcommand(
      "verify", "Prove that the ranks compute the same gradient as one process on the whole batch");
  auto flags = std::make_shared<VerifyFlags>();
  add_run_flags(*verb, *flags);
  verb->get_option("CONFIG")->required(false);
  std::vector<std::string> layouts = strategy_names();
  layouts.insert(layouts.end(), {kAllLayouts, kAllMeshes});
  offers(
      add_option(
          *verb, "--layout", flags->layouts,
          "layout to test; default: the configured one. Give a strategy, optionally followed by :replicas=N "
          "and by :share=on or :share=off. meshes tests the configured strategy on the other meshes of the "
          "ranks; all tests every strategy and every mesh that the ranks allow",
          "NAME")
          ->check(no_such_layout),
      layouts);
  add_json(*verb, flags->json, "the verdict");
  add_option(*verb, "--report", flags->report, "write the verdict as a page to this file", "FILE.html");
  add_option(*verb, "--dump", flags->dump,
             "write the gradients of one process and of each layout to this folder, for isograd compare",
             "DIR");
  add_option(*verb, "--minimise", flags->minimise,
             "write the smallest configuration that still fails to this file", "FILE.toml");
  const std::vector<CLI::Option*> of_runs =
      verb->get_options([&](const CLI::Option* option) { return option != verb->get_help_ptr(); });
  CLI::Option* const server =
      add_option(*verb, "--server", flags->server,
                 "check a training server instead of a run: compare its steps and samples with those of one "
                 "process in fp64, and name its mistakes",
                 "URL");
  add_option(*verb, "--api-key-file", flags->key_file,
             "file with an API key of the server; default: the variable TINKER_API_KEY", "FILE")
      ->needs(server);
  add_option(*verb, "--base", flags->base,
             "Hugging Face directory of the server's only model; default: download its weights", "DIR")
      ->needs(server);
  verb->add_flag("--adapters", flags->adapters,
                 "check adapters only, which takes less memory than whole weights")
      ->needs(server);
  verb->footer(
      "Runs one step of the configuration on each layout and compares every parameter's gradient with a\n"
      "step in fp64 on one process. The grades are E1, equal in exact arithmetic; E2, equal within\n"
      "rounding; and E3, the same bits in every run (DESIGN.md).\n\n"
      "  isograd verify examples/first_light.toml --ranks 2 --report verdict.html\n"
      "  isograd verify examples/first_light.toml --ranks 4 --layout all\n"
      "  isograd verify --server http://127.0.0.1:8000\n\n"
      "Exit status: 0 proven; 1 the gradients differ, or part of a server could not be checked; 2 bad\n"
      "input; 3 a rank was lost; 4 a defect of isograd.");
  const auto action = [flags, of_runs, &invocation] {
    if (!flags->server.empty()) {
      for (const CLI::Option* option : of_runs)
        if (option->count() > 0)
          refuse("--server", option->get_name() + ", which a run has", "--api-key-file, --base, --adapters",
                 "Leave it out");
      return server_verb(*flags);
    }
    if (flags->config.empty())
      refuse("isograd verify", "neither a configuration nor --server", "one of them",
             "Name the file of a run, or a server");
    const RunConfig config = configuration(*flags);
    std::vector<fs::path> inputs{config.source, config.data.tokenizer, config.data.table, config.model.load};
    for (const auto* more : {&config.data.text, &config.data.shards, &config.video.files})
      inputs.insert(inputs.end(), more->begin(), more->end());
    for (const auto& [option, file] :
         {std::pair("--json", flags->json), {"--report", flags->report}, {"--minimise", flags->minimise}})
      check_no_input(option, file, inputs);
    if (!flags->minimise.empty()) return minimise_verb(*flags, config);
    return on_ranks(invocation, *flags, config, [&](World& world) {
      const auto write = [&](const std::string& name, const StepDump& dump) {
        write_dump(dump, fs::path(flags->dump) / name);
      };
      std::optional<Waiting> waiting;  // on rank 0
      const auto begins = [&](std::int64_t number, std::int64_t total, const std::string& layout) {
        if (!waiting) waiting.emplace("layout", total);
        waiting->begin(number, layout);
      };
      std::vector<std::string> layouts = flags->layouts;
      if (std::find(layouts.begin(), layouts.end(), kAllLayouts) != layouts.end())
        layouts.push_back(kAllMeshes);
      const Verdict verdict =
          verify_run(config, world, layouts, {}, flags->dump.empty() ? TakeDump() : TakeDump(write), begins);
      waiting.reset();
      if (world.rank == 0) {
        Wording wording = verify_wording(verdict);
        wording.command = "isograd " + shell_words(invocation.arguments);
        wording.configuration = to_toml(config);
        if (flags->json != kStandardOutput) print_verdict(stdout, to_text(verdict, wording));
        if (!flags->json.empty()) write_output(flags->json, to_json(verdict, wording) + "\n");
        std::fflush(stdout);
        if (!flags->report.empty()) write_verify_page(verdict, wording, flags->report);
      }
      return verdict.passed ? 0 : 1;
    });
  };
  return {verb, action};
}

}  // namespace isograd
