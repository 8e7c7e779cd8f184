// isograd report: runs laid over one another.
#include "base/files.hpp"
#include "base/output.hpp"
#include "base/print.hpp"
#include "cli/verbs.hpp"
#include "train/run_records.hpp"

namespace isograd {

Verb report_verb(CLI::App& program) {
  CLI::App* verb = program.add_subcommand("report", "Lay runs over one another: figures, curves, keys");
  struct Flags {
    std::vector<std::string> runs;
    std::string html, json;
  };
  auto flags = std::make_shared<Flags>();
  verb->add_option("RUN", flags->runs, "folders of runs (run.directory), up to 6; one may be under way")
      ->required();
  add_option(*verb, "--html", flags->html, "the curves of all runs as a page go here", "FILE.html");
  add_json(*verb, flags->json, "the figures");
  verb->footer(
      "Prints each run's last step, losses and speed, and the configuration keys in which they differ.\n\n"
      "  isograd report runs/first_light runs/longer --html runs.html\n\n"
      "Status: 0 done; 2 bad input; 4 a defect of isograd.");
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
