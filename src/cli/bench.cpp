// isograd bench: our speed against a peer's, in the same run.
#include "bench/bench.hpp"
#include "cli/verbs.hpp"

namespace isograd {

std::vector<Verb> bench_verbs(CLI::App& program) {
  CLI::App* bench = program.add_subcommand("bench", "Compare speeds with PyTorch on this machine");
  bench->require_subcommand(1);

  CLI::App* step =
      bench->add_subcommand("step", "Whole training steps: PyTorch on one rank, PyTorch DDP on several");
  auto options = std::make_shared<BenchStepOptions>();
  step->add_option("--ranks", options->ranks,
                   "numbers of ranks to compare; 1 and 2 unless given, may be repeated")
      ->type_name("N")
      ->allow_extra_args(false)
      ->check(CLI::Range(1, 256));
  step->add_option("--case", options->cases, "which sizes; all unless given, may be repeated")
      ->type_name("NAME")
      ->allow_extra_args(false)
      ->check(CLI::IsMember(bench_step_cases()));
  step->add_option("--json", options->json,
                   "records go here: {bench, case, ours, peer, peer_name, unit, ratio}")
      ->type_name("FILE");
  step->add_option("--seconds", options->seconds, "of taking turns, for each case and number of ranks")
      ->type_name("S")
      ->check(CLI::Range(0.1, 1e6))
      ->capture_default_str();
  step->add_option("--python", options->python,
                   "has PyTorch; $PYTHON, .venv/bin/python or python3 unless given")
      ->type_name("FILE");
  step->footer(
      "A ratio above 1 means that isograd is faster.\n"
      "Status: 0 compared, whatever the ratios; 1 the losses of the two differ; 2 bad input.");

  // Hidden: our side of the comparison, started by the above.
  CLI::App* ours = bench->add_subcommand("step-ours", "")->group("");
  struct Ours {
    std::string exchange;
    int ranks = 1;
  };
  auto mine = std::make_shared<Ours>();
  ours->add_option("EXCHANGE", mine->exchange)->required();
  ours->add_option("RANKS", mine->ranks)->required();
  return {{step, [options] { return bench_step(*options); }},
          {ours, [mine] { return bench_step_ours(mine->exchange, mine->ranks); }}};
}

}  // namespace isograd
