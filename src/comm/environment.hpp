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
  };  // kVariables: RANK and so on, by ours, torchrun or hand
  Launcher launcher = Launcher::kVariables;
  int rank = 0;
  int size = 1;
  int local_size = 0;   // ranks on this host; 0 where the launcher does not say
  int hosts = 0;        // likewise
  std::string address;  // of the store; empty where nobody says
  int port = 0;
  std::string store;             // of our launcher, by name; empty where another has started the ranks
  bool store_is_hosted = false;  // at `address`, by torchrun's agent; otherwise rank 0 hosts it
  std::string session_folder;    // of mpirun's job, on each host
  std::string run;               // which of those that a launcher has started at the same place: srun's step
  std::string attempt = "0";     // differs between restarts of the same ranks, which may share a store
};

// Set by launch_ranks(): the name of the store that the launcher hosts.
inline constexpr const char* kLaunchedVariable = "ISOGRAD_STORE";

// Whether a variable says which rank a process is: a launcher does not pass on what it was itself started
// with.
bool says_rank(const std::string& variable);

// Empty when no launcher has started this process. ConfigError, naming the variables, when they contradict.
// 1. RANK and WORLD_SIZE (ours, torchrun's, or set by hand). What torchrun or we have set goes before all
// else,
//    as these may themselves have been started by mpirun or srun; set by hand it must agree with the others.
// 2. mpirun: OMPI_COMM_WORLD_RANK and _SIZE (Open MPI), or PMI_RANK and PMI_SIZE (MPICH and others).
// 3. srun: SLURM_PROCID and SLURM_STEP_NUM_TASKS. A batch script has the former alone and is no rank.
// MASTER_ADDR and MASTER_PORT say where the store is. Without them it is on loopback under an srun of one
// host, else on the step's first host; its port follows from the
// numbers of the job and the step, 15000 + the last four digits of the job's for its first step.
std::optional<RankEnvironment> read_rank_environment();

// ConfigError unless mpirun or srun has started the ranks, which MPI needs.
void check_mpi(const RankEnvironment& environment);

// ConfigError unless all ranks are on this host, or may be, and their store can be found.
void check_one_host(const RankEnvironment& environment);

// The name of the ranks' store on this host (LocalStore); empty where they may be on several hosts, so that
// it must be at `address`. `join`: how many times this process has joined before.
std::string local_store_name(const RankEnvironment& environment, int join);

// What the keys of these ranks begin with in a store that others may use as well.
std::string store_prefix(const RankEnvironment& environment, int join);

}  // namespace isograd
