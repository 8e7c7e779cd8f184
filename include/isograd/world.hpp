// World: the ranks that started together, their store, their host; and the ways to start them.
#pragma once

#include "isograd/cxx20.hpp"

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "isograd/group.hpp"

namespace isograd {

class World {
 public:
  int rank = 0;
  int size = 1;
  Group group = Group::solo();  // all ranks
  std::string host;

  // A group of these ranks of the world, in this order: rank i of the group is ranks[i]. Collective over them
  // alone, with the timeout of the world's group. Groups may overlap, and any number of them may exist; ranks
  // that share several make them in one order. Groups of the same ranks may have the same name. ConfigError
  // unless this rank is among them, PeerError when others do not come in time.
  Group subgroup(const std::vector<int>& ranks, const std::string& name, GroupOptions options = {}) const;

 private:
  struct Membership;  // how the ranks find one another
  friend struct WorldMaker;
  std::shared_ptr<Membership> membership_;
};

struct JoinOptions {
  std::chrono::milliseconds timeout = std::chrono::minutes(5);  // of every wait of the world's group
  std::string backend = "shm";                                  // one of backends()
};

// What carries data between ranks in this build: "shm" (one host); where an MPI was found, "mpi" and
// "shm+mpi" (shared memory within hosts); on a CUDA build "nccl" (one host, a GPU for each rank).
std::vector<std::string> backends();

// Joins the ranks this process was started with, by `isograd launch` or --ranks, torchrun, mpirun or srun
// (src/comm/README.md says which variables are read). Without any: a world of one. With an MPI the ranks are
// mpirun's or srun's. Throws ConfigError on contradictory variables, PeerError when the other ranks do not
// arrive in time.
World join(const JoinOptions& options = {});

// Ranks as threads of this process: runs `body` on `size` threads, each with its World (one intra-op thread
// each), over "shm". The first rank to throw poisons the group; its error is rethrown here with its rank in
// front, even where ranks that ended because of it were faster to say so.
void run_ranks(int size, const std::function<void(World&)>& body, const JoinOptions& options = {});

struct LaunchOptions {
  int ranks = 1;
  std::chrono::milliseconds grace =
      std::chrono::seconds(10);  // for the others to end by themselves after a failure
  bool prefix_output = false;    // "[rank] " before each line
  std::string backend = "shm";   // or "nccl"; "mpi", "shm+mpi": mpirun starts the ranks
};

// Ranks as processes of this host: starts `command` (argv, searched in PATH) `ranks` times with the variables
// that join() reads, a store of this user's, and OMP_NUM_THREADS=1 unless set. Passes SIGINT, SIGTERM and
// SIGHUP on. When a rank fails the others get `grace` to end (stopped ones none), then SIGTERM, then SIGKILL.
// Returns 0, or the status that says most: 3 if any rank was killed by a signal (named on stderr) or lost a
// peer, else the first non-zero status; 128 + n if the ranks ended by signal n because it was passed on. The
// ranks read nothing from the terminal, and are killed should this process be.
// With an MPI's backend mpirun starts them (its variables instead, no store). As soon as one fails it ends
// all, with SIGTERM and a second later SIGKILL whatever `grace` is, and returns the status of the first that
// failed.
int launch_ranks(const std::vector<std::string>& command, const LaunchOptions& options);

}  // namespace isograd
