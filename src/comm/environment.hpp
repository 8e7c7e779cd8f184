// The variables with which launchers start ranks: ours, torchrun, mpirun and srun.
#pragma once

#include <optional>
#include <string>

namespace isograd {

struct RankEnvironment {
  // kVariables: RANK and so on, set by isograd's launcher, torchrun or by hand.
  enum class Launcher { kVariables, kMpirun, kSrun };
  Launcher launcher = Launcher::kVariables;
  int rank = 0;
  int size = 1;
  int local_size = 0;   // ranks on this host; 0: the launcher does not set it
  int hosts = 0;        // hosts of all ranks; 0: the launcher does not set it
  std::string address;  // of the store; empty: not set
  int port = 0;
  std::string store;             // name of the store of isograd's launcher; empty: another launcher
  bool store_is_hosted = false;  // torchrun's agent hosts the store at `address`; otherwise rank 0 does
  std::string session_folder;    // mpirun's folder for the job, on each host
  std::string run;            // distinguishes runs that a launcher starts in one place, such as srun's steps
  std::string attempt = "0";  // differs between restarts of the same ranks, which may share a store
};

constexpr int kStatusPeerLost = 3;  // exit status of a rank that lost another (docs/errors.md)

// Set by launch_ranks(): the name of the store that the launcher hosts.
inline constexpr const char* kLaunchedVariable = "ISOGRAD_STORE";

// Whether a variable says which rank a process is. A launcher removes these from the environment of its
// ranks.
bool says_rank(const std::string& variable);

// Reads the variables of launchers, in the order of README.md. Nothing: no launcher has started this process.
// ConfigError that names the variables when they contradict.
std::optional<RankEnvironment> read_rank_environment();

// ConfigError unless mpirun or srun has started the ranks, which MPI needs.
void check_mpi(const RankEnvironment& environment);

// ConfigError unless all ranks are or may be on this host and their store can be found.
void check_one_host(const RankEnvironment& environment);

// The name of the ranks' store on this host (LocalStore). Empty where ranks may be on several hosts: the
// store is then at `address`. `join`: how many times this process has joined before.
std::string local_store_name(const RankEnvironment& environment, int join);

// The prefix of these ranks' keys in a store that other runs may use as well.
std::string store_prefix(const RankEnvironment& environment, int join);

}  // namespace isograd
