// Meeting: how the ranks of a benchmark begin at one moment and learn each other's times, without help from
// what they measure.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "comm/shm/segment.hpp"

namespace isograd::python {

using Clock = std::chrono::steady_clock;  // one clock for all processes of a host

class Meeting {
 public:
  // Collective. The ranks are processes of one host.
  Meeting(c10d::Store& store, int rank, int size);

  int rank() const { return rank_; }
  int size() const { return size_; }

  // Returns on all ranks at once: at an agreed moment where each rank has a core, else as soon as all came.
  void start_together();
  // Everyone's value, by rank.
  std::vector<double> exchange(double mine);
  double largest(double mine);
  // Seconds that a cache line takes from rank 0's core to rank 1's and back; median of a few hundred trips.
  double round_trip();

 private:
  struct Shared;
  template <typename Condition>
  void wait_until(Condition&& condition) const;
  void arrive();

  int rank_;
  int size_;
  bool own_cores_;  // each rank can have one
  std::shared_ptr<shm::Segment> segment_;
  Shared* shared_ = nullptr;
  std::uint64_t meetings_ = 0;
  std::uint64_t trips_ = 0;
};

}  // namespace isograd::python
