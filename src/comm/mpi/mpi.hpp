// The MPI functions that the rest of isograd calls, without mpi.h. In a build without MPI they throw a
// ConfigError that explains how to get it (absent.cpp).
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

namespace isograd::mpi {

bool built();
void require();  // ConfigError in a build without MPI

struct Rank {
  int rank = 0;
  int size = 1;
};

// Initialises MPI unless the program has, and finalises it when the process exits. PeerError when the other
// ranks do not arrive within `timeout`, or 30 s if that is longer.
Rank start(std::chrono::milliseconds timeout);

// The most elements of one MPI call, because its counts are ints. Larger tensors are split where the
// operation allows it and refused otherwise (ConfigError). Tests set it low.
inline constexpr std::int64_t kMostElements = std::int64_t{1} << 30;

// Collective over all ranks of the job. `timeout` applies as in start().
c10::intrusive_ptr<c10d::Backend> make_world(const std::string& name, std::chrono::milliseconds timeout,
                                             std::int64_t most_elements = kMostElements);

// Collective over `ranks` of the job, in the order of the new group. `key` is the same on all of them and
// unique for each group they make.
c10::intrusive_ptr<c10d::Backend> make_subgroup(const std::vector<int>& ranks, const std::string& name,
                                                const std::string& key, std::chrono::milliseconds timeout);

// mpirun's arguments before the command: one host, `ranks` ranks, no binding to cores.
std::vector<std::string> launcher(int ranks);

}  // namespace isograd::mpi
