// Shared by verbs that run on several ranks: a configuration, flags, and the start of the ranks.
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
  bool overwrite = false;  // for verbs that write a run's folder
};

void add_run_flags(CLI::App& verb, RunFlags& flags);

// Loads the file, then applies --device, --backend and --set, in this order.
RunConfig configuration(const RunFlags& flags, std::vector<std::string> more_sets = {});

// Runs `body` on every rank and returns the status. One rank runs in this process; for more it starts itself
// once per rank (through mpirun for "mpi"). Ranks of a launcher are recognised by their environment.
int on_ranks(const Invocation& invocation, const RunFlags& flags, const RunConfig& config,
             const std::function<int(World&)>& body);

// This process's rank if there are several; nothing for a process on its own.
std::optional<int> rank_of_several();

}  // namespace isograd
