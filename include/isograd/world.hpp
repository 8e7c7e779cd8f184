// World: the ranks that started together, and the ways to start them. Mesh: those ranks on named axes. Hosts:
// where they run.
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

  // Makes a group of these ranks of the world: rank i of the group is ranks[i]. Collective over them alone,
  // with the timeout of the world's group. Groups may overlap; ranks that share several groups make them in
  // the same order. Names need not be unique. ConfigError unless this rank is among them, PeerError when
  // others do not come in time.
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

// Backends of this build: "shm" (one host); with MPI also "mpi" and "shm+mpi" (shared memory within hosts);
// on a CUDA build "nccl" (one host, a GPU for each rank).
std::vector<std::string> backends();

// Joins the ranks that this process was started with, by `isograd launch` or --ranks, torchrun, mpirun or
// srun (src/comm/README.md names the variables). Without any: a world of one. ConfigError on contradictory
// variables, PeerError when other ranks do not arrive in time.
World join(const JoinOptions& options = {});

// Runs `body` on `size` threads of this process, each a rank with its World over "shm" and one intra-op
// thread. The first rank to throw poisons the group; its error is rethrown here and names the rank.
void run_ranks(int size, const std::function<void(World&)>& body, const JoinOptions& options = {});

// Exit status of a rank, or of a run, that has saved and is to be run again (EX_TEMPFAIL). No failure.
inline constexpr int kStatusAgain = 75;

struct LaunchOptions {
  int ranks = 1;
  std::chrono::milliseconds grace = std::chrono::seconds(10);  // for the others to end after a failure
  bool prefix_output = false;                                  // "[rank] " before each line
  std::string backend = "shm";  // or "nccl"; "mpi", "shm+mpi": mpirun starts the ranks
  // Ranks that we start begin with SIGUSR1 and SIGUSR2 blocked, and unblock them where they handle them.
  bool holds_user_signals = false;
};

// Starts `command` (argv, searched in PATH) as `ranks` processes of this host with the variables that join()
// reads and OMP_NUM_THREADS=1 unless it is set. Passes SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 on. When
// a rank fails the others get `grace` to end (stopped ones none), then SIGTERM, then SIGKILL. Returns 0, or
// the most informative status: 3 if any rank was killed by a signal (named on stderr) or lost a peer, else
// the first that is neither 0 nor kStatusAgain, else kStatusAgain if a rank has it; 128 + n if the ranks
// ended by signal n because it was passed on. The ranks read nothing from the terminal and are killed when
// this process is. mpirun has its own (src/comm/README.md).
int launch_ranks(const std::vector<std::string>& command, const LaunchOptions& options);

// ---- Mesh ----

// The ranks of a world on the axes of a grid, and the groups along them. Copyable; copies share their groups.
class Mesh {
 public:
  // ConfigError unless the grid has as many ranks as the world.
  Mesh(const World& world, Grid grid);
  // As above, over groups of any backend that the caller makes. `make` is called once per group, on all of
  // its ranks, which it is given in ascending order.
  using MakeGroup = std::function<Group(const std::vector<int>& ranks, const std::string& name)>;
  Mesh(Group all, Grid grid, MakeGroup make);
  // Puts all ranks of the group along dp_shard.
  Mesh(Group all);  // NOLINT: with one axis, the group says everything

  const Grid& grid() const;
  AxisSet data() const;                   // data_axes() of the grid
  int rank() const;                       // of this rank, in the grid and in the world
  int size(const AxisSet& along) const;   // Grid::size()
  int place(const AxisSet& along) const;  // Grid::place() of this rank
  Group all() const;                      // the world's group

  // Returns the group of ranks that differ from this one along these axes alone, in ascending order. The
  // first call is collective over them; the group is kept. Along all ranks: the world's own group.
  // A `use` asks for a separate group of the same ranks, whose operations are not ordered with those of other
  // groups: attention exchanges within backward, while backward also launches reductions.
  Group along(const AxisSet& axes, const std::string& use = {}) const;
  // Seconds that this rank has waited in groups with a `use`.
  double waited_apart() const;
  // The ranks that see different data. Targets, samples and weights are counted over them alone, since other
  // ranks hold the same ones.
  Group counting() const;
  // True on one rank of each set that holds the same data and stage. Only that rank adds its loss to sums.
  bool contributes() const;
  // True where this rank has the first pipeline stage, or there is none.
  bool has_first_stage() const;
  // Returns the group of these ranks, in ascending order, this one among them. Made once, collective over
  // them. Its errors name `name`.
  Group among(const std::vector<int>& ranks, const std::string& name) const;

 private:
  struct Impl;
  Group made(std::vector<int> ranks, const std::string& use, const std::string& name) const;
  std::shared_ptr<Impl> impl_;
};

// ---- Hosts: which ranks share a machine's memory, which axes stay within one, and what leaves it ----

struct Hosts {
  std::vector<int> of_rank{0};         // by rank of the world: index into `names`
  std::vector<std::string> names{""};  // in the order of their first ranks
  int count() const { return static_cast<int>(names.size()); }
};

// The hosts of this world. Over MPI the ranks exchange them; otherwise one host.
Hosts hosts_of(const World& world);
// Places `ranks` ranks in their order on `hosts` hosts, as evenly as possible; the first ones get one more,
// as mpirun does where all hosts have as many slots. ConfigError unless 1 <= hosts <= ranks.
Hosts planned_hosts(int ranks, int hosts);

// Axes along which some ranks have others on another host; outermost first.
std::vector<std::string> axes_across(const Grid& grid, const Hosts& hosts);
// Advice: a sentence for each axis across hosts that should stay within one (tp, ep, cp, and dp_shard where
// replicas could keep their shards within), naming the ranks and what to do. Empty: none.
std::vector<std::string> said_of_hosts(const Grid& grid, const Hosts& hosts);
// "2 hosts (a: ranks 0-3; b: ranks 4-7), across: dp_replicate, within: tp"; of one host: empty.
std::string hosts_text(const Grid& grid, const Hosts& hosts);

// Bytes that one rank has sent (Traffic::bytes), within its host and across hosts. Exact for sums and gathers
// of shm+mpi, messages, all-to-alls, gathers and scatters; elsewhere what a ring of the ranks would send.
struct HostBytes {
  std::int64_t within = 0, across = 0;
};
HostBytes host_bytes(const Group& group);
HostBytes host_bytes(const World& world);  // of all its groups so far

}  // namespace isograd
