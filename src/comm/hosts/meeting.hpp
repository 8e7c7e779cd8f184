// Exchanges which MPI ranks share a host, and connects the ranks of one host.
#pragma once

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "comm/hosts/identity.hpp"
#include "isograd/world.hpp"

namespace isograd {

struct HostsOfWorld {
  Hosts hosts{};
  std::vector<std::string> stores{};  // by host: the name of its ranks' store
};

// Whether mpirun starts the ranks of this backend.
bool through_mpi(const std::string& backend);

// Collective over `all`. ConfigError on every rank when they were started with different backends.
HostsOfWorld exchange_hosts(c10d::Backend& all, const HostIdentity& own, const std::string& backend);

// The store of this rank's host, which its first rank serves. Null: no other rank is on this host.
c10::intrusive_ptr<c10d::Store> meet_on_host(const HostsOfWorld& world, int rank,
                                             std::chrono::milliseconds timeout);

}  // namespace isograd
