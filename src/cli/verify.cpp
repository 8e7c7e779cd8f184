// isograd verify: is the gradient of this layout the gradient of one device?
#include "base/files.hpp"
#include "cli/ranks.hpp"
#include "cli/verbs.hpp"
#include "verify/run.hpp"

namespace isograd {

Verb verify_verb(CLI::App& program, const Invocation& invocation) {
  CLI::App* verb = program.add_subcommand(
      "verify", "Prove that the ranks' gradient is the one that one process has on the whole batch");
  struct Flags : RunFlags {
    std::vector<std::string> layouts;
    std::string json, report;
  };
  auto flags = std::make_shared<Flags>();
  add_run_flags(*verb, *flags);
  verb->add_option("--layout", flags->layouts,
                   "layout under test, may be repeated; parallel.strategy unless given")
      ->type_name("NAME")
      ->allow_extra_args(false)
      ->check(CLI::IsMember(layout_names()));
  verb->add_option("--json", flags->json, "the verdict as JSON goes here")->type_name("FILE");
  verb->add_option("--report", flags->report, "the verdict as a page goes here")->type_name("FILE.html");
  verb->footer(
      "Makes one step of the configured run on every layout and compares each parameter's gradient with a\n"
      "plain step in fp64 on one process. Grades: E1 exact arithmetic, E2 within rounding, E3 same bits run "
      "to\n"
      "run (DESIGN.md).\n\n"
      "  isograd verify examples/first_light.toml --ranks 2 --report verdict.html\n\n"
      "Status: 0 proven; 1 not the same gradient; 2 bad input; 3 a rank was lost; 4 a defect of isograd.");
  const auto action = [flags, &invocation] {
    const RunConfig config = configuration(*flags);
    return on_ranks(invocation, *flags, config, [&](World& world) {
      const Verdict verdict = verify_run(config, world, flags->layouts);
      if (world.rank == 0) {
        std::fputs(to_text(verdict).c_str(), stdout);
        std::fflush(stdout);
        if (!flags->json.empty()) write_file(flags->json, to_json(verdict) + "\n");
        if (!flags->report.empty()) write_verify_page(verdict, flags->report, to_toml(config));
      }
      return verdict.passed ? 0 : 1;
    });
  };
  return {verb, action};
}

}  // namespace isograd
