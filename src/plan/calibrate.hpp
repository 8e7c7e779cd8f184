// `isograd calibrate`: what this machine reaches, by isograd's own products, passes and groups.
#pragma once

#include <cstdint>

#include "isograd/world.hpp"
#include "plan/inputs.hpp"

namespace isograd::planner {

struct CalibrateOptions {
  double seconds = 50;  // of the whole; each part has its share, and three rounds
  bool products = true;
};

// Collective: every rank measures with the others running, as they do in a step. Rank 0 has the result. A
// part whose three rounds differ by more than kSteadyPeak (train/memory.hpp) is not written, and
// `not_measured` says so: the machine was busy.
ClusterFile calibrate(World& world, const CalibrateOptions& options);

}  // namespace isograd::planner
