// World: the ranks that started together, their store, their host; and the ways to start them.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "isograd/group.hpp"

namespace isograd {

struct World {
  int rank = 0;
  int size = 1;
  Group group = Group::solo();  // all ranks
  std::string host;
};

struct JoinOptions {
  std::chrono::milliseconds timeout = std::chrono::minutes(5);  // of every wait of the world's group
  std::string backend = "shm";  // the only one so far; others are ConfigErrors
};

// Joins the ranks this process was started with: reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
// MASTER_ADDR and MASTER_PORT (launch_ranks and torchrun set them). Without them: a world of one. Throws
// ConfigError on contradictory variables, PeerError when the other ranks do not arrive in time.
World join(const JoinOptions& options = {});

// Ranks as threads of this process: runs `body` on `size` threads, each with its World (one intra-op thread
// each). The first rank to throw poisons the group; its error is rethrown here with its rank in front.
void run_ranks(int size, const std::function<void(World&)>& body, const JoinOptions& options = {});

struct LaunchOptions {
  int ranks = 1;
  std::chrono::milliseconds grace =
      std::chrono::seconds(10);  // for the others to end by themselves after a failure
  bool prefix_output = false;    // "[rank] " before each line
};

// Ranks as processes of this host: starts `command` (argv, searched in PATH) `ranks` times with the variables
// that join() reads, a store on loopback owned by this process, and OMP_NUM_THREADS=1 unless set. Passes
// SIGINT/SIGTERM on. When a rank fails the others get `grace` to end, then SIGTERM, then SIGKILL.
// Returns 0, or the status that says most: 3 if any rank was killed by a signal (named on stderr) or lost a
// peer, else the first non-zero status; 128 + n if the ranks ended by signal n because it was passed on. The
// ranks read nothing from the terminal, and are killed should this process be.
int launch_ranks(const std::vector<std::string>& command, const LaunchOptions& options);

}  // namespace isograd
