// Which host a rank is on, which ranks share a host, how the ranks of one host find each other, and the
// corresponding groups of a mesh on hosts.
#pragma once

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "isograd/world.hpp"

namespace isograd {

struct HostIdentity {
  std::string name;     // human-readable
  std::string machine;  // equal for processes that can map each other's memory
  std::string torch;    // the LibTorch of the process: "2.13"
};

// Overrides the host of a rank: one name, or one for each rank of the job, with commas between. For tests of
// several hosts on one machine.
inline constexpr const char* kHostVariable = "ISOGRAD_HOST";

// The host of this process: the running kernel and its process namespace, or ISOGRAD_HOST. ConfigError when
// ISOGRAD_HOST is not a valid name, or does not have one name for each rank.
HostIdentity identify_host();

// ConfigError: ranks with other LibTorches may round otherwise, so that no rank is wrong and the gradients
// differ.
void check_torch(const std::string& where, int rank, const std::string& torch, const std::string& of_rank_0);

// As above, with the network namespace, which ranks that share a LocalStore must have in common.
std::string identify_meeting_place(const HostIdentity& host);

struct HostsOfWorld {
  Hosts hosts{};
  std::vector<std::string> stores{};  // by host: the name of its ranks' store
};

// Whether mpirun starts the ranks of this backend.
bool through_mpi(const std::string& backend);

// Collective over `all`. ConfigError on every rank when they have different backends or LibTorches.
HostsOfWorld exchange_hosts(c10d::Backend& all, const HostIdentity& own, const std::string& backend);

// The store of this rank's host, which its first rank serves. Null: no other rank is on this host.
c10::intrusive_ptr<c10d::Store> meet_on_host(const HostsOfWorld& world, int rank,
                                             std::chrono::milliseconds timeout);

// Whether the groups that correspond to `ranks` elsewhere in the grid are split among hosts in the same way.
// Their sums are then added in the same order. This fails where a host ends between ranks along tp: one copy
// of a norm weight is summed over data ranks of which two share a host, and the next copy over data ranks of
// which two others do.
bool siblings_split_alike(const Grid& grid, const Hosts& hosts, const std::vector<int>& ranks);

// World::subgroup() of ranks of a mesh. Where corresponding groups are split differently, only MPI carries
// the group. Its order of a sum does not depend on hosts, so copies of one gradient keep the same bits.
Group mesh_subgroup(const World& world, const Grid& grid, const std::vector<int>& ranks,
                    const std::string& name);

}  // namespace isograd
