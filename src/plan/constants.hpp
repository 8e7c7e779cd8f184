// The only numbers of the planner that are fitted: at most twelve, each with an independent source within a
// factor of two, and the width of the interval around what they foretell. `isograd plan --validate` measures
// the widths; docs/planning.md shows both, and a test holds page and table together.
#pragma once

#include <cstdint>

#include "isograd/planner.hpp"

namespace isograd::planner {

enum class Program : std::uint8_t { kIsograd, kNanotron, kOther };

struct Constants {
  // The share of a device's peak that large products reach: of a data sheet, where nothing is calibrated.
  // Small products reach share * n / (n + half_size), with n the geometric mean of m, n and k.
  double share_of_peak = 0.6, half_size = 512;
  double layer_overhead = 0;                      // seconds of the host for a layer of a micro-batch
  double share_inside = 0.8, share_across = 0.4;  // of a link's bandwidth, inside a host and between hosts
  double passes = 10;      // over a layer's stream by operators that no product hides; isograd's are counted
  double overlap = 1;      // of a collective behind computation: the part that is hidden
  double nearly_full = 0;  // added to the step in per cent where more than 92 % of the memory is in use

  // kNanotron, kOther: activation bytes of a layer and token by the widths of its tensors, over tp; isograd's
  // are listed (model/kept_tensors.hpp).
  double by_hidden = 20, by_feed_forward = 8;
};
Constants constants_of(Program program, const Device& device, Precision precision);

// Half widths of intervals, as parts of the value, by what is foretold and where its numbers come from.
struct Widths {
  double memory = 0, seconds = 0;
};
Widths widths_of(Program program, Origin origin, bool experts);

}  // namespace isograd::planner
