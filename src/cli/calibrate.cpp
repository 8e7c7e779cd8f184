// isograd calibrate: measures this machine for `isograd plan --cluster here`.
#include "plan/calibrate.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <thread>

#include "base/files.hpp"
#include "base/memory.hpp"
#include "base/print.hpp"
#include "cli/verbs.hpp"
#include "comm/environment.hpp"

namespace isograd {
namespace {

std::string summary(const planner::ClusterFile& found, const std::string& file) {
  const planner::Calibration& of = found.calibration;
  std::string text = fmt::format("{}: {} ranks\n", printable(of.machine), found.cluster.devices);
  for (std::size_t i = 0; i < planner::kPrecisions; ++i)
    if (const double best = found.cluster.device.best_found[i]; best > 0)
      text += fmt::format("products in {}: up to {:.4g} GFLOP/s a rank\n",
                          name_of(static_cast<planner::Precision>(i)), best / 1e9);
  for (const auto& [name, rate] : {std::pair{"memory", found.cluster.device.memory_bandwidth},
                                   {"passes of a layer", of.memory_bandwidth},
                                   {"copies to experts", of.expert_bandwidth},
                                   {"update of an optimizer", of.optimizer_bandwidth}})
    if (rate > 0) text += fmt::format("{}: {:.3g} GB/s a rank\n", name, rate / 1e9);
  if (of.operator_overhead > 0) text += fmt::format("an operator: {:.3g} us\n", of.operator_overhead * 1e6);
  for (const auto& one : of.collectives)
    text += fmt::format("{} over {}, {} ranks: {:.3g} us + {:.3g} GB/s\n", one.operation, one.backend,
                        one.ranks, one.latency * 1e6, one.bandwidth / 1e9);
  if (of.overlap)
    text += fmt::format("of a reduction {:.0f} % is hidden behind products\n", *of.overlap * 100);
  for (const std::string& sentence : of.not_measured) text += fmt::format("not measured: {}\n", sentence);
  return text + fmt::format("written to {}\n", printable(file));
}

}  // namespace

Verb calibrate_verb(CLI::App& program, const Invocation& invocation) {
  CLI::App* verb =
      program.add_subcommand("calibrate", "Measure this machine, for isograd plan --cluster here");
  struct Flags {
    std::optional<int> ranks;
    std::string output = planner::here_file().string();
  };
  auto flags = std::make_shared<Flags>();
  add_option(*verb, "--ranks", flags->ranks,
             "number of processes that measure at the same time; default: one per core", "N", 1, 4096);
  add_option(*verb, "-o,--output", flags->output,
             "file to write the measurements to; isograd plan --cluster here reads the default one", "FILE");
  verb->footer(
      "Takes less than a minute. All ranks measure matrix products, attention, memory bandwidth, the\n"
      "optimizer's update, and each collective for several sizes and numbers of ranks. A figure that varies\n"
      "from round to round, for instance because the machine is busy, is left out, and the file names it.\n"
      "\n"
      "Exit status: 0 written; 2 bad input, or every figure varied; 3 a rank was lost; 4 a defect of\n"
      "isograd.");
  return {verb, [flags, &invocation] {
            const fs::path file = flags->output;
            const bool launched = read_rank_environment().has_value();
            const int cores = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
            const int ranks = flags->ranks.value_or(cores);
            if (!launched) {
              // A minute of measuring is not lost to a file that cannot be written.
              if (fs::is_directory(file))
                refuse("isograd calibrate -o " + file.string(), "a folder", "a file", "Name a file in it");
              fs::create_directories(fs::absolute(file).parent_path());
              const AtomicFile writable(file);
            }
            RunConfig config;
            config.batch.packs_per_step = std::max<std::int64_t>(config.batch.packs_per_step, ranks);
            // mpirun then starts the ranks, which measure over both.
            const auto built = backends();
            const bool mpi = ranks > 1 && std::ranges::count(built, "mpi") > 0;
            config.parallel.backend = mpi ? "mpi" : "shm";
            RunFlags run;
            run.ranks = launched ? flags->ranks : ranks;
            return on_ranks(invocation, run, config, [&](World& world) {
              keep_freed_memory();
              std::optional<World> here;
              if (mpi && world.size > 1) here = join({.backend = "shm"});
              if (world.rank == 0)
                print(stdout,
                      fmt::format("measuring on {} ranks, which takes less than a minute\n", world.size));
              std::fflush(stdout);
              const planner::ClusterFile found = planner::calibrate(
                  here ? *here : world, {.mpi = here ? std::optional(world.group) : std::nullopt});
              if (world.rank > 0) return 0;
              write_file(file, to_toml(found));
              print(stdout, summary(found, file.string()));
              return 0;
            });
          }};
}

}  // namespace isograd
