// The only numbers of the planner that are fitted: at most twelve, each with an independent source within a
// factor of two, and the width of the interval around what they foretell. `isograd plan --validate` measures
// the widths; docs/planning.md shows both, and a test holds page and table together.
#pragma once

#include <cstdint>

#include "isograd/planner.hpp"

namespace isograd::planner {

enum class Program : std::uint8_t { kIsograd, kNanotron, kOther };

// Each program's law has its own. docs/planning.md has the source of each and what the fit found in either
// half.
struct Constants {
  // Fitted on published runs.
  double share_of_peak = 0.573;      // of a data sheet's FLOP/s, that products reach
  double layer_overhead = 1.968e-3;  // seconds of the host for a layer of a micro-batch
  double share_inside = 0.691,
         share_across = 0.317;             // of a link's bandwidth, inside a host and between hosts
  double allocated = 1.089;                // bytes that an allocator takes for a byte that is kept
  double fixed_bytes = 0.293 * (1 << 30);  // of libraries
  // Taken from their sources as they are.
  double share_of_attention = 0.25;  // of the same peak, by fused attention
  double share_of_memory = 0.85;     // of a data sheet's bytes/s
  double passes = 6;                 // forward and backward move a kept byte as often
  double overlap = 0.38;             // of a backward, that hides the reduction

  // Counted, not fitted: activation bytes of a layer and token by the widths of its tensors, over tp.
  // isograd's are listed (model/kept_tensors.hpp).
  double by_hidden = 20, by_feed_forward = 8;
};
// As they stand in NCCL's src/graph/tuning.cc (5067397c): the start of a ring, seconds, and a tree's
// bandwidth. The steps' latencies are those of Link.
inline constexpr double kRingStart = 6.6e-6, kTreeShare = 0.92;

Constants constants_of(Program program, const Device& device, Precision precision);

// Half widths of intervals, as parts of the value, by what is foretold and where its numbers come from.
struct Widths {
  double memory = 0, seconds = 0;
};
Widths widths_of(Program program, Origin origin, bool experts);

}  // namespace isograd::planner
