// `isograd calibrate`: what this machine reaches, by isograd's own products, passes and groups.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "isograd/world.hpp"
#include "plan/inputs.hpp"

namespace isograd::planner {

struct CalibrateOptions {
  double seconds = 44;  // parts for which none is left are left out; rounds made again take an eighth more
  std::optional<Group> mpi{};  // the same ranks over MPI, where that is there
  // For tests: the seconds that a part of this size (FLOPs, bytes) is said to have taken in a round.
  std::function<double(const std::string& kind, int round, double size)> told{};
};

// Collective: every rank measures with the others running, as they do in a step. Rank 0 has the result. A
// part takes the median of its rounds, of which there are more until the middle half agrees within
// kSteadyPeak (train/memory.hpp); one whose never does is not written, and `not_measured` says so: the
// machine was busy. ConfigError on all ranks: too little was steady to plan from.
ClusterFile calibrate(World& world, const CalibrateOptions& options);

}  // namespace isograd::planner
