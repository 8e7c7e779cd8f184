// World: the ranks that started together, their store, their host; and the ways to start them.
#pragma once

#include "isograd/error.hpp"

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "isograd/grid.hpp"
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

// Mesh: the ranks of a world on the axes of a grid, and the groups along them.

// Copyable; copies share their groups.
class Mesh {
 public:
  // ConfigError unless the grid has as many ranks as the world.
  Mesh(const World& world, Grid grid);
  // The same over groups that the caller makes, of any backend. `make` is called once for a group, on all of
  // its ranks, which are given in ascending order.
  using MakeGroup = std::function<Group(const std::vector<int>& ranks, const std::string& name)>;
  Mesh(Group all, Grid grid, MakeGroup make);
  // All ranks of the group along dp_shard.
  Mesh(Group all);  // NOLINT: where there is one axis, the group says everything

  const Grid& grid() const;
  AxisSet data() const;                   // data_axes() of the grid
  int rank() const;                       // of this rank, in the grid and in the world
  int size(const AxisSet& along) const;   // Grid::size()
  int place(const AxisSet& along) const;  // Grid::place() of this rank
  Group all() const;                      // the world's group

  // The ranks that differ from this one along these axes alone, in ascending order. The first call is
  // collective over them; the group is kept. Along all ranks: the world's own group.
  // A `use` asks for a group apart from others of the same ranks, whose operations need no common order with
  // theirs: attention exchanges within backward, beside the reductions that backward launches.
  Group along(const AxisSet& axes, const std::string& use = {}) const;
  // Seconds that this rank has waited in groups with a use of their own.
  double waited_apart() const;
  // The ranks that see different data: targets, samples and weights are counted over them and nowhere else,
  // since the others hold the same ones.
  Group counting() const;
  // Of the ranks that hold the same data and stage, whether this one is the first: it gives what is to be
  // added up once.
  bool speaks() const;
  // Whether it has the first stage of a pipeline, if there is one.
  bool has_first_stage() const;
  // The group of these ranks, in ascending order, this one among them. Made once, collective over them.
  // `name` appears in its errors.
  Group among(const std::vector<int>& ranks, const std::string& name) const;

 private:
  struct Impl;
  Group made(std::vector<int> ranks, const std::string& use, const std::string& name) const;
  std::shared_ptr<Impl> impl_;
};

// Hosts: which ranks share a machine's memory, which axes of a mesh stay within one, and what leaves them.

struct Hosts {
  std::vector<int> of_rank{0};         // by rank of the world: which of `names`
  std::vector<std::string> names{""};  // in the order of their first ranks
  int count() const { return static_cast<int>(names.size()); }
};

// Of this world: over MPI what the ranks have told one another, else one host.
Hosts hosts_of(const World& world);
// `ranks` ranks in their order over `hosts` hosts, as evenly as possible: the first ones get one more. What
// mpirun does where all hosts have as many slots. ConfigError unless 1 <= hosts <= ranks.
Hosts planned_hosts(int ranks, int hosts);

// The axes of several ranks along which some ranks have others on another host; outermost first.
std::vector<std::string> axes_across(const Grid& grid, const Hosts& hosts);
// What should be otherwise: a sentence for each axis across hosts that had better lie within (tp, ep, cp, and
// dp_shard where replicas could hold shards within), with the ranks that show it and what to do. Empty: none.
std::vector<std::string> said_of_hosts(const Grid& grid, const Hosts& hosts);
// "2 hosts (a: ranks 0-3; b: ranks 4-7), across: dp_replicate, within: tp"; of one host: empty.
std::string hosts_text(const Grid& grid, const Hosts& hosts);

// What one rank has sent (Traffic::bytes), and how much of it left its host. Exact for what shm+mpi sums and
// gathers, for messages, all-to-alls, gathers and scatters; elsewhere, as Traffic, what a ring of the ranks
// would send: a rank's bytes leave where the next rank is on another host.
struct HostBytes {
  std::int64_t within = 0, across = 0;
};
HostBytes host_bytes(const Group& group);
HostBytes host_bytes(const World& world);  // of all its groups so far

}  // namespace isograd
