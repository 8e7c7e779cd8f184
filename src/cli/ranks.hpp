// What verbs that work on several ranks have in common: a configuration, flags, and how ranks come to be.
#pragma once

#include <CLI/CLI.hpp>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cli/verbs.hpp"
#include "isograd/world.hpp"
#include "train/config.hpp"

namespace isograd {

struct RunFlags {
  std::string config;
  std::optional<int> ranks;
  std::vector<std::string> sets;
  std::string device, backend;
  bool overwrite = false;  // of verbs that write a run's folder
};

void add_run_flags(CLI::App& verb, RunFlags& flags);

// The file, then --device, --backend and --set, in this order.
RunConfig configuration(const RunFlags& flags, std::vector<std::string> more_sets = {});

// Runs `body` on every rank and returns the program's status. One rank works in this process. For more, this
// process starts itself that many times (through mpirun where the backend is "mpi") and waits; those, like
// ranks started by torchrun, mpirun or srun, are recognised by their environment and join.
int on_ranks(const Invocation& invocation, const RunFlags& flags, const RunConfig& config,
             const std::function<int(World&)>& body);

// Of several ranks, which one this process is; nothing for a process on its own.
std::optional<int> rank_of_several();

}  // namespace isograd
