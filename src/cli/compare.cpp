// isograd compare: two gradient dumps of one step, of any trainer.
#include "base/files.hpp"
#include "base/output.hpp"
#include "base/print.hpp"
#include "base/waiting.hpp"
#include "cli/verbs.hpp"
#include "isograd/verify.hpp"
#include "verify/present.hpp"

namespace isograd {

Verb compare_verb(CLI::App& program) {
  CLI::App* verb = program.add_subcommand(
      "compare", "Compare the gradients that two trainers wrote for the same step (docs/verify.md)");
  struct Flags {
    std::string found, expected, alone, json, report;
  };
  auto flags = std::make_shared<Flags>();
  verb->add_option("A", flags->found, "folder with the dump of the trainer to check")->required();
  verb->add_option("B", flags->expected,
                   "folder with the dump of the same step by one process, if possible in fp64")
      ->required();
  add_option(
      *verb, "--alone", flags->alone,
      "folder with the dump of the same step by one process in the precision of A; it shows how large the "
      "differences are that come from rounding alone",
      "DIR");
  add_json(*verb, flags->json, "the verdict");
  add_option(*verb, "--report", flags->report, "write the verdict as a page to this file", "FILE.html");
  verb->footer(
      "  isograd compare dumps/ddp dumps/one --report verdict.html\n\n"
      "Exit status: 0 the same gradient; 1 another gradient, or another step; 2 bad input; 4 a defect of\n"
      "isograd.");
  const auto action = [flags] {
    const DumpNames names{flags->found, flags->expected};
    for (const auto& [option, file] : {std::pair("--json", flags->json), {"--report", flags->report}})
      check_no_input(option, file, {flags->found, flags->expected, flags->alone});
    std::optional<StepDump> alone;
    std::optional<Waiting> waiting(std::in_place, "part", flags->alone.empty() ? 3 : 4, 0,
                                   StatusOptions{.in_a_log = false});
    const auto read = [&](const std::string& dump) {
      waiting->begin("reading " + dump);
      return read_dump(dump);
    };
    if (!flags->alone.empty()) alone = read(flags->alone);
    const StepDump expected = read(names.expected);
    StepDump found = read(names.found);
    waiting->begin("comparing every parameter");
    const DumpComparison comparison = compare_dumps(std::move(found), expected, names, alone);
    waiting.reset();
    const Wording wording = compare_wording(comparison, names, flags->alone);
    if (flags->json != kStandardOutput) print_verdict(stdout, to_text(comparison.verdict, wording));
    if (!flags->json.empty()) write_output(flags->json, to_json(comparison.verdict, wording) + "\n");
    if (!flags->report.empty()) write_verify_page(comparison.verdict, wording, flags->report);
    return comparison.verdict.passed ? 0 : 1;
  };
  return {verb, action};
}

}  // namespace isograd
