// isograd layout: prints the placement of every parameter of a run without starting it.
#include <cstdio>

#include "base/files.hpp"
#include "base/output.hpp"
#include "base/print.hpp"
#include "cli/verbs.hpp"
#include "train/config.hpp"
#include "train/rank_layout.hpp"

namespace isograd {

Verb layout_verb(CLI::App& program) {
  CLI::App* verb = program.add_subcommand(
      "layout", "Print where every parameter of a run is placed, without starting the run");
  struct Flags {
    std::string config;
    std::vector<std::string> sets;
    int ranks = 1, rank = 0, hosts = 1;
    std::string json;
  };
  auto flags = std::make_shared<Flags>();
  verb->add_option("CONFIG", flags->config, "TOML file of the run (docs/configuration.md lists every key)")
      ->required();
  add_option(*verb, "--ranks", flags->ranks, "number of ranks of the run", "N", 1, 4096);
  add_option(*verb, "--rank", flags->rank, "rank whose part is printed", "R")->capture_default_str();
  add_option(*verb, "--hosts", flags->hosts,
             "number of hosts, over which the ranks are spread evenly in their order", "H");
  add_option(*verb, "--set", flags->sets, "override a key of the file, as in --set parallel.strategy=zero2",
             "KEY=VALUE");
  add_json(*verb, flags->json, "the placement (docs/layout.md)");
  verb->footer(
      "Prints the mesh of ranks. For each parameter it then prints the shapes, the axes along which it is\n"
      "split, copied, summed and sharded, the ranks that own its elements, and the bytes that a rank keeps.\n"
      "No rank is started and no weight is created. Videos and tables are read, because the size of their\n"
      "models depends on them.\n\n"
      "  isograd layout examples/first_light.toml --ranks 4 --set parallel.strategy=zero2\n\n"
      "Exit status: 0 done; 2 bad input; 4 a defect of isograd.");
  const auto action = [flags] {
    check_no_input("--json", flags->json, {flags->config});
    const RunLayout run =
        lay_out(load_config(flags->config, flags->sets), flags->ranks, flags->rank, flags->hosts);
    if (flags->json != kStandardOutput) print(stdout, to_text(run));
    if (!flags->json.empty()) write_output(flags->json, to_json(run));
    return 0;
  };
  return {verb, action};
}

}  // namespace isograd
