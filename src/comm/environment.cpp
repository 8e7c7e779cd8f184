#include "comm/environment.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <limits>

#include "base/files.hpp"
#include "base/number_ranges.hpp"
#include "base/refuse.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

constexpr int kMostRanks = 1 << 20;

// The first of these that is set and not empty.
template <typename... Names>
std::optional<std::string> variable(Names... names) {
  for (const char* name : {names...})
    if (const char* value = std::getenv(name); value && *value) return value;
  return std::nullopt;
}

[[noreturn]] void refuse_environment(const std::string& found, const std::string& expected) {
  refuse("the environment of this rank", found, expected,
         "Start the ranks with --ranks N, isograd launch, torchrun, mpirun or srun, or unset "
         "these variables to run alone");
}

std::optional<int> number(const char* name, int low, int high) {
  const auto text = variable(name);
  if (!text) return std::nullopt;
  const auto value = number_in<int>(*text);
  if (!value || *value < low || *value > high)
    refuse_environment(fmt::format("{}={}", name, *text), fmt::format("a number from {} to {}", low, high));
  return value;
}

// The four variables with which a launcher describes a process.
struct Names {
  RankEnvironment::Launcher launcher;
  const char *rank, *size, *local_rank, *local_size;
};

using Launcher = RankEnvironment::Launcher;
constexpr Names kVariables{Launcher::kVariables, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
constexpr Names kOpenMpi{Launcher::kMpirun, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                         "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"};
constexpr Names kPmi{Launcher::kMpirun, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"};
constexpr Names kSrun{Launcher::kSrun, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", nullptr};

std::optional<RankEnvironment> read(const Names& names) {
  const auto size = number(names.size, 1, kMostRanks), rank = number(names.rank, 0, kMostRanks);
  if (!size && (!rank || names.launcher == Launcher::kSrun)) return std::nullopt;
  if (!size || !rank)
    refuse_environment(
        fmt::format("{} without {}", size ? names.size : names.rank, size ? names.rank : names.size),
        "both or neither");
  if (*rank >= *size)
    refuse_environment(fmt::format("{}={} with {}={}", names.rank, *rank, names.size, *size),
                       fmt::format("{} below {}", names.rank, names.size));
  const auto local_rank = number(names.local_rank, 0, kMostRanks);
  const auto local_size = names.local_size ? number(names.local_size, 1, kMostRanks) : std::nullopt;
  if (local_size && *local_size > *size)
    refuse_environment(fmt::format("{}={} with {}={}", names.local_size, *local_size, names.size, *size),
                       fmt::format("at most {}", names.size));
  if (local_rank && *local_rank >= local_size.value_or(*size))
    refuse_environment(fmt::format("{}={} of {} ranks on this host", names.local_rank, *local_rank,
                                   local_size.value_or(*size)),
                       "a lower number");
  RankEnvironment environment;
  environment.launcher = names.launcher;
  environment.rank = *rank;
  environment.size = *size;
  environment.local_size = local_size.value_or(0);
  return environment;
}

// The first of "node[003-005,9],other" is node003.
std::string first_host(const std::string& list) {
  const auto bracket = list.find_first_of("[,");
  if (bracket == std::string::npos || list[bracket] == ',') return list.substr(0, bracket);
  const auto close = list.find(']', bracket);
  if (close == std::string::npos) refuse_environment("a node list '" + list + "'", "a closing ]");
  const auto first = list.substr(bracket + 1, list.find_first_of("-,]", bracket) - bracket - 1);
  return list.substr(0, bracket) + first + first_host(list.substr(close + 1));
}

std::optional<RankEnvironment> read_mpirun() {
  auto environment = read(kOpenMpi);
  if (!environment) environment = read(kPmi);
  const auto pmix = number("PMIX_RANK", 0, kMostRanks);
  if (environment && pmix && *pmix != environment->rank)
    refuse_environment(fmt::format("PMIX_RANK={} in rank {} of mpirun", *pmix, environment->rank),
                       "one rank");
  if (!environment) return environment;
  environment->session_folder = variable("PMIX_SERVER_TMPDIR", "OMPI_FILE_LOCATION").value_or("");
  environment->run = variable("PMIX_NAMESPACE").value_or("");  // several jobs of one server share its folder
  return environment;
}

std::optional<RankEnvironment> read_srun() {
  auto environment = read(kSrun);
  if (!environment) {
    if (number("PMIX_RANK", 0, kMostRanks))
      refuse_environment("PMIX_RANK without the number of ranks",
                         "the other variables that mpirun or srun set");
    return environment;
  }
  auto hosts = number("SLURM_STEP_NUM_NODES", 1, kMostRanks);
  if (!hosts) hosts = number("SLURM_NNODES", 1, kMostRanks);
  const auto list = variable("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST");
  environment->hosts = hosts.value_or(0);
  if (environment->hosts == 1) {
    environment->address = "127.0.0.1";
  } else if (list) {
    environment->address = first_host(*list);
  }
  // Steps of one job may run at once on the same hosts.
  const auto step = variable("SLURM_STEP_ID", "SLURM_STEPID");
  environment->run = fmt::format("{}.{}", variable("SLURM_JOB_ID").value_or(""), step.value_or(""));
  if (const auto job = number("SLURM_JOB_ID", 0, std::numeric_limits<int>::max())) {
    constexpr std::int64_t kStepDistance = 613;  // simultaneous jobs have numbers close to one another
    const auto steps = std::strtoll(step.value_or("0").c_str(), nullptr, 10) % 10000;
    environment->port = static_cast<int>(15000 + (*job % 10000 + kStepDistance * steps) % 10000);
  }
  return environment;
}

}  // namespace

bool says_rank(const std::string& variable) {
  for (const Names& names : {kVariables, kOpenMpi, kPmi, kSrun})
    for (const char* name : {names.rank, names.size, names.local_rank, names.local_size})
      if (name && variable == name) return true;
  for (const char* begin : {"OMPI_COMM_WORLD_", "OMPI_MCA_orte_", "OMPI_MCA_ess", "OMPI_MCA_pmix", "PMIX_",
                            "PMI_", "TORCHELASTIC_"}) {
    if (variable.rfind(begin, 0) == 0) return true;
  }
  return variable == kLaunchedVariable || variable == "MASTER_ADDR" || variable == "MASTER_PORT";
}

std::optional<RankEnvironment> read_rank_environment() {
  const auto agent = variable("TORCHELASTIC_USE_AGENT_STORE");
  const auto launched = variable(kLaunchedVariable);
  auto environment = read(kVariables);
  if (!environment || !(launched || variable("TORCHELASTIC_RUN_ID"))) {
    auto other = read_mpirun();
    if (!other) other = read_srun();
    if (environment && other && other->size > 1 &&
        (other->size != environment->size || other->rank != environment->rank))
      refuse_environment(fmt::format("RANK={} and WORLD_SIZE={} in rank {} of {} of {}", environment->rank,
                                     environment->size, other->rank, other->size,
                                     other->launcher == Launcher::kSrun ? "srun" : "mpirun"),
                         "one rank");
    // A launcher of a single process may have started the one that sets RANK.
    if (other && (!environment || other->size == environment->size)) environment = other;
  }
  if (!environment || environment->size == 1) return environment;
  const auto address = variable("MASTER_ADDR");
  const auto port = number("MASTER_PORT", 1, 65535);
  if (address) environment->address = *address;
  if (port) environment->port = *port;
  environment->store = launched.value_or("");
  environment->store_is_hosted = agent && (*agent == "True" || *agent == "1");
  if (const auto id = variable("TORCHELASTIC_RUN_ID")) environment->run = *id;
  environment->attempt = variable("TORCHELASTIC_RESTART_COUNT").value_or("0");
  return environment;
}

void check_mpi(const RankEnvironment& environment) {
  if (environment.launcher != Launcher::kVariables || variable("OMPI_COMM_WORLD_SIZE") ||
      variable("PMI_SIZE") || variable("PMIX_RANK"))
    return;
  refuse("the environment of this rank",
         fmt::format("RANK={} and WORLD_SIZE={}, and no mpirun", environment.rank, environment.size),
         "ranks that mpirun or srun started, which the backend 'mpi' needs",
         "Use isograd launch --backend mpi, or mpirun -n N");
}

void check_one_host(const RankEnvironment& environment) {
  if (environment.local_size != 0 && environment.local_size != environment.size)
    refuse_environment(fmt::format("{} of {} ranks on this host", environment.local_size, environment.size),
                       "all ranks on one host, which the shm backend needs (--backend shm+mpi does not)");
  if (environment.hosts > 1)
    refuse_environment(fmt::format("{} hosts", environment.hosts),
                       "all ranks on one host, which the shm backend needs (--backend shm+mpi does not)");
  const bool address = !environment.address.empty(), port = environment.port != 0;
  if ((address && port) || !local_store_name(environment, 0).empty()) return;
  refuse_environment(address ? "no MASTER_PORT" : "no MASTER_ADDR", "where the store listens");
}

std::string local_store_name(const RankEnvironment& environment, int join) {
  if (!environment.store.empty()) return environment.store;
  const std::string& address = environment.address;
  const bool loopback = address == "127.0.0.1" || address == "localhost" || address == "::1";
  const bool job = address.empty() && environment.port == 0 && !environment.session_folder.empty();
  const bool one_host =
      loopback || job || environment.local_size == environment.size || environment.hosts == 1;
  if (!one_host || (environment.port == 0 && !job)) return {};
  // mpirun's folder for the job, or a port, distinguishes this run from others on the host.
  const std::string run = job ? environment.session_folder : fmt::format("port {}", environment.port);
  const std::string key = fmt::format("{}, user {}, {}", run, ::geteuid(), store_prefix(environment, join));
  return "isograd-" + checksum(key.data(), key.size());
}

std::string store_prefix(const RankEnvironment& environment, int join) {
  return fmt::format("isograd/{}/{}/{}", environment.run, environment.attempt, join);
}

}  // namespace isograd
