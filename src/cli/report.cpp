// isograd report: runs laid over one another.
#include "base/files.hpp"
#include "base/output.hpp"
#include "base/print.hpp"
#include "cli/verbs.hpp"
#include "train/run_records.hpp"

namespace isograd {

Verb report_verb(CLI::App& program) {
  CLI::App* verb =
      program.add_subcommand("report", "Compare runs: their losses, speed, curves and differing settings");
  struct Flags {
    std::vector<std::string> runs;
    std::string html, json;
  };
  auto flags = std::make_shared<Flags>();
  verb->add_option("RUN", flags->runs, "folders of up to 6 runs (run.directory), which may still be running")
      ->required();
  add_option(*verb, "--html", flags->html, "write a page with the curves of all runs to this file",
             "FILE.html");
  add_json(*verb, flags->json, "the figures");
  verb->footer(
      "Prints the last step, losses and speed of each run, and the configuration keys that differ.\n\n"
      "  isograd report runs/first_light runs/longer --html runs.html\n\n"
      "Exit status: 0 done; 2 bad input; 4 a defect of isograd.");
  const auto action = [flags] {
    const std::vector<RunRecord> runs = read_runs(flags->runs);
    std::vector<fs::path> inputs;
    for (const std::string& run : flags->runs)
      for (const char* file : {"metrics.jsonl", "config.toml"}) inputs.push_back(fs::path(run) / file);
    for (const auto& [option, file] : {std::pair("--html", flags->html), {"--json", flags->json}})
      check_no_input(option, file, inputs);
    if (flags->json != kStandardOutput) print(stdout, overlaid_text(runs));
    if (!flags->json.empty()) write_output(flags->json, overlaid_json(runs));
    if (!flags->html.empty()) overlaid_page(runs).write(flags->html);
    return 0;
  };
  return {verb, action};
}

}  // namespace isograd
