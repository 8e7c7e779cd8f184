// The variables with which launchers start ranks: ours, torchrun, mpirun and srun.
#pragma once

#include <optional>
#include <string>

namespace isograd {

struct RankEnvironment {
  enum class Launcher {
    kVariables,
    kMpirun,
    kSrun
  };  // kVariables: RANK and so on, set by isograd's launcher, torchrun or by hand
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

// Reads the variables of launchers. Returns nothing when no launcher has started this process. Throws a
// ConfigError that names the variables when they contradict.
// 1. RANK and WORLD_SIZE (isograd's launcher, torchrun, or by hand). Those of torchrun and isograd take
// precedence, because mpirun or srun may have started these launchers. Set by hand they must agree with the
// others.
// 2. mpirun: OMPI_COMM_WORLD_RANK and _SIZE (Open MPI), or PMI_RANK and PMI_SIZE (MPICH and others).
// 3. srun: SLURM_PROCID and SLURM_STEP_NUM_TASKS. A batch script has only SLURM_PROCID and is no rank.
// MASTER_ADDR and MASTER_PORT give the place of the store. Without them it is on loopback under an srun of
// one host, else on the step's first host. Its port follows from the numbers of the job and the step: 15000 +
// the last four digits of the job's number for its first step.
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
