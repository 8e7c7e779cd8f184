#include "cli/verbs.hpp"

#include <cmath>
#include <filesystem>

#include "base/output.hpp"
#include "base/refuse.hpp"
#include "comm/environment.hpp"
#include "train/config_table.hpp"
#include "train/device.hpp"
#include "train/rank_zero.hpp"

namespace isograd {
std::optional<int> rank_of_several() {
  try {
    const auto environment = read_rank_environment();
    if (environment && environment->size > 1) return environment->rank;
  } catch (const ConfigError&) {  // join() reports the contradiction
  }
  return std::nullopt;
}

void add_run_flags(CLI::App& verb, RunFlags& flags) {
  verb.add_option("CONFIG", flags.config, "TOML file of the run (docs/configuration.md lists every key)")
      ->required();
  add_option(verb, "--ranks", flags.ranks, "number of ranks, which are processes on this host", "N", 1, 4096)
      ->default_str("1");
  add_option(verb, "--set", flags.sets, "override a key of the file, as in --set train.steps=50",
             "KEY=VALUE");
  const auto of_key = [](CLI::Option* option, const std::string& name) {
    for (const ConfigKey& key : config_keys())
      if (key.name == name) offers(option, key.allowed.choices);
  };
  of_key(add_option(verb, "--device", flags.device, "device of a rank (parallel.device): cpu, cuda, auto",
                    "NAME"),
         "parallel.device");
  of_key(add_option(verb, "--backend", flags.backend,
                    "backend between ranks (parallel.backend): auto, shm, mpi, shm+mpi, nccl", "NAME"),
         "parallel.backend");
}

RunConfig configuration(const RunFlags& flags, std::vector<std::string> more_sets) {
  if (flags.config.empty())
    refuse("CONFIG", "an empty name", "the TOML file of a run",
           "Name it; a variable of the shell that is not set is empty");
  std::vector<std::string> sets = std::move(more_sets);
  if (!flags.device.empty()) sets.push_back("parallel.device=" + flags.device);
  if (!flags.backend.empty()) sets.push_back("parallel.backend=" + flags.backend);
  sets.insert(sets.end(), flags.sets.begin(), flags.sets.end());
  RunConfig config = load_config(flags.config, sets);
  config.overwrite = flags.overwrite;
  return config;
}

int on_ranks(const Invocation& invocation, const RunFlags& flags, const RunConfig& config,
             const std::function<int(World&)>& body) {
  const int ranks = flags.ranks.value_or(1);
  if (!read_rank_environment() && ranks > 1) {
    check(config, ranks);  // before ranks are started, so that an error is reported once
    std::vector<std::string> command = {fs::read_symlink("/proc/self/exe").string()};
    command.insert(command.end(), invocation.arguments.begin(), invocation.arguments.end());
    // mpirun gives each rank a terminal of its own, whatever this process writes to.
    command.insert(command.end(), {"--color", in_colour(stdout) ? "always" : "never"});
    return launch_ranks(command, {.ranks = ranks,
                                  .backend = backend_of(config, ranks),
                                  .holds_user_signals = flags.handles_user_signals});
  }
  const auto timeout =
      std::chrono::milliseconds(std::llround(std::ceil(config.parallel.timeout_seconds * 1e3)));
  const auto environment = read_rank_environment();
  const int size = environment ? environment->size : 1;
  check_device(config, size);  // before the backend, which may be missing, is opened
  const std::string backend = backend_of(config, size);
  World world = join({.timeout = timeout, .backend = backend});
  if (flags.ranks && ranks != world.size)
    refuse(fmt::format("--ranks {}", ranks), fmt::format("WORLD_SIZE={} in the environment", world.size),
           "the same number, or no --ranks where a launcher has started the ranks", "Leave --ranks out");
  check_same_configuration(config, world.group);
  check(config, world.size);
  const int status = body(world);
  // NCCL takes a rank down that still reads from one whose process has ended.
  if (backend == "nccl") world.group.barrier();
  return status;
}

}  // namespace isograd
