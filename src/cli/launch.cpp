// isograd launch: any program as ranks of this host, as torchrun would start it.
#include <fmt/ranges.h>

#include "base/refuse.hpp"
#include "cli/verbs.hpp"
#include "isograd/world.hpp"

namespace isograd {

Verb launch_verb(CLI::App& program, const Invocation& invocation) {
  CLI::App* verb =
      program.add_subcommand("launch", "Start a program of your own on several ranks of this host");
  struct Flags {
    int ranks = 0;
    bool prefix = false;
    double grace = 10;
    std::string backend = "shm";
  };
  auto flags = std::make_shared<Flags>();
  add_option(*verb, "-n,--ranks", flags->ranks, "processes to start", "N", 1, 4096)->required();
  verb->add_flag("--prefix", flags->prefix, "put \"[rank] \" before each line that a rank prints");
  add_option(*verb, "--grace", flags->grace,
             "seconds for the others to end by themselves when one has failed (shm)", "S", 0.0, 1e6);
  offers(add_option(*verb, "--backend", flags->backend,
                    "backend of the ranks: shm or nccl (started here), mpi or shm+mpi (by mpirun)", "NAME"),
         backends());
  verb->footer(fmt::format("This build has the backends {}.\n", fmt::join(backends(), ", ")) +
               "Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, "
               "which\n"
               "isograd::join() and torch.distributed read; with --backend mpi or shm+mpi, mpirun's "
               "instead.\n"
               "The words after -- are the command.\n\n"
               "  isograd launch -n 2 -- ./my_trainer --epochs 3\n\n"
               "Status: 0; 3 if a rank was killed or lost a peer; otherwise "
               "the first that\n"
               "is not 0.");
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
