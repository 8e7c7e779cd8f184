// isograd launch: any program as ranks of this host, as torchrun would start it.
#include <fmt/ranges.h>

#include "base/refuse.hpp"
#include "cli/verbs.hpp"
#include "isograd/world.hpp"

namespace isograd {

Verb launch_verb(CLI::App& program, const Invocation& invocation) {
  CLI::App* verb = program.add_subcommand("launch", "Start your own program as several ranks on this host");
  struct Flags {
    int ranks = 0;
    bool prefix = false;
    double grace = 10;
    std::string backend = "shm";
  };
  auto flags = std::make_shared<Flags>();
  add_option(*verb, "-n,--ranks", flags->ranks, "number of ranks to start", "N", 1, 4096)->required();
  verb->add_flag("--prefix", flags->prefix, "print \"[rank] \" in front of each line of output");
  add_option(*verb, "--grace", flags->grace,
             "seconds that the other ranks have to end by themselves after one has failed (shm)", "S", 0.0,
             1e6);
  offers(add_option(*verb, "--backend", flags->backend,
                    "backend of the ranks: shm and nccl are started by isograd, mpi and shm+mpi by mpirun",
                    "NAME"),
         backends());
  verb->footer(
      fmt::format("This build has the backends {}.\n", fmt::join(backends(), ", ")) +
      "The words after -- are the command. Each rank gets RANK, WORLD_SIZE, LOCAL_RANK,\n"
      "LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which isograd::join() and torch.distributed\n"
      "read. With --backend mpi or shm+mpi it gets mpirun's variables instead.\n\n"
      "  isograd launch -n 2 -- ./my_trainer --epochs 3\n\n"
      "SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are passed on to the ranks.\n"
      "Exit status: 0 if all ranks ended with 0; 3 if a rank was killed or lost a peer; otherwise the\n"
      "first status that is neither 0 nor 75; 75 if a rank has saved and is to be run again.");
  const auto action = [flags, &invocation] {
    if (invocation.command.empty())
      refuse("isograd launch", "no command", "-- COMMAND ...",
             "Write it as in isograd launch -n 2 -- ./my_trainer --epochs 3");
    return launch_ranks(invocation.command,
                        {.ranks = flags->ranks,
                         .grace = std::chrono::milliseconds(static_cast<std::int64_t>(flags->grace * 1e3)),
                         .prefix_output = flags->prefix,
                         .backend = flags->backend});
  };
  return {verb, action};
}

}  // namespace isograd
