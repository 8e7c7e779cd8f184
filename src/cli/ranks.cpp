#include "cli/ranks.hpp"

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "isograd/error.hpp"

namespace isograd {
namespace {

std::optional<int> number_in_environment(const char* name) {
  const char* text = std::getenv(name);
  int number = 0;
  if (!text || std::from_chars(text, text + std::strlen(text), number).ec != std::errc()) return std::nullopt;
  return number;
}

bool started_as_rank() {
  return std::getenv("RANK") || std::getenv("WORLD_SIZE");
}

}  // namespace

std::optional<int> rank_of_several() {
  if (number_in_environment("WORLD_SIZE").value_or(1) == 1) return std::nullopt;
  return number_in_environment("RANK");
}

void add_run_flags(CLI::App& verb, RunFlags& flags) {
  verb.add_option("CONFIG", flags.config, "TOML file of the run (docs/configuration.md lists every key)")
      ->required();
  verb.add_option("--ranks", flags.ranks, "processes of this host that work together; 1 unless given")
      ->type_name("N")
      ->check(CLI::Range(1, 4096));
  verb.add_option("--set", flags.sets, "goes before the file, e.g. --set train.steps=50; may be repeated")
      ->type_name("KEY=VALUE")
      ->allow_extra_args(false);
  verb.add_option("--backend", flags.backend, "what carries data between ranks (parallel.backend): shm")
      ->type_name("NAME");
}

RunConfig configuration(const RunFlags& flags, std::vector<std::string> more_sets) {
  std::vector<std::string> sets = std::move(more_sets);
  if (!flags.backend.empty()) sets.push_back("parallel.backend=" + flags.backend);
  sets.insert(sets.end(), flags.sets.begin(), flags.sets.end());
  return load_config(flags.config, sets);
}

int on_ranks(const Invocation& invocation, const RunFlags& flags, const RunConfig& config,
             const std::function<int(World&)>& body) {
  const int ranks = flags.ranks.value_or(1);
  if (!started_as_rank() && ranks > 1) {
    check(config, ranks);  // before anything starts, so that it is said once
    std::vector<std::string> command = {std::filesystem::read_symlink("/proc/self/exe").string()};
    command.insert(command.end(), invocation.arguments.begin(), invocation.arguments.end());
    return launch_ranks(command, {.ranks = ranks});
  }
  const auto timeout =
      std::chrono::milliseconds(std::llround(std::ceil(config.parallel.timeout_seconds * 1e3)));
  World world = join({.timeout = timeout, .backend = config.parallel.backend});
  if (flags.ranks && ranks != world.size)
    throw ConfigError({.where = fmt::format("--ranks {}", ranks),
                       .found = fmt::format("WORLD_SIZE={} in the environment", world.size),
                       .expected = "the same number, or no --ranks where a launcher has started the ranks",
                       .action = "Leave --ranks out"});
  check(config, world.size);
  return body(world);
}

}  // namespace isograd
