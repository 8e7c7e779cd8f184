// Hosts: which ranks share a machine's memory, which axes of a mesh stay within one, and what leaves them.
#pragma once

#include "isograd/cxx20.hpp"

#include <cstdint>
#include <string>
#include <vector>

#include "isograd/grid.hpp"
#include "isograd/group.hpp"
#include "isograd/world.hpp"

namespace isograd {

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
