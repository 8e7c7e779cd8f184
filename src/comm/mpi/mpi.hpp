// What the rest of isograd asks of MPI, without mpi.h: a build without MPI answers with a ConfigError that
// says how to get it (absent.cpp).
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

namespace isograd::mpi {

bool built();
void require();  // ConfigError where it is not

struct Rank {
  int rank = 0;
  int size = 1;
};

// Initialises MPI unless somebody has, and arranges that it is finalised when the process exits. PeerError
// when the other ranks do not come within `timeout`, or 30 s where that is longer.
Rank start(std::chrono::milliseconds timeout);

// The most elements of one MPI call, whose counts are ints. Operations that can be cut are cut there; others
// refuse more (ConfigError). Tests set it low.
inline constexpr std::int64_t kMostElements = std::int64_t{1} << 30;

// Collective over all ranks of the job, which have as long to come.
c10::intrusive_ptr<c10d::Backend> make_world(const std::string& name, std::chrono::milliseconds timeout,
                                             std::int64_t most_elements = kMostElements);

// Collective over `ranks` (of the job, in the order of the new group) alone. `key` is the same on all of them
// and differs from that of every other group they make.
c10::intrusive_ptr<c10d::Backend> make_subgroup(const std::vector<int>& ranks, const std::string& name,
                                                const std::string& key, std::chrono::milliseconds timeout);

// mpirun's arguments before the command: one host, as many ranks as asked for, no rank bound to a core.
std::vector<std::string> launcher(int ranks);

}  // namespace isograd::mpi
