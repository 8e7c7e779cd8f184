// What rounding costs one process: steps from parameters an ulp away, whose rounding is another draw.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "verify/layout_run.hpp"
#include "verify/oracle.hpp"

namespace isograd {

// The same samples in another order, dealt to at most `pieces` micro-batches; each `turn` deals otherwise.
// Fragments stay whole.
MicroBatches cut_anew(const MicroBatches& whole, std::int64_t pieces, std::uint64_t turn);

// Parameters that one run did not clear: their places among the trainable ones, and the error of one process
// that would clear each.
struct Doubtful {
  std::vector<std::size_t> places;
  std::vector<double> wanted;
};

// The largest ‖g32 − g64‖ / s of each of them over up to kMostDraws steps of one process, on rank 0; fewer as
// soon as all are cleared. Collective: rank 0 says which, the last rank makes the steps, each from parameters
// an ulp away, in which kernels round otherwise, in fp64 and in the run's precision, and (but for a loss over
// all rows) in another cut of the batch with as many micro-batches as all ranks have together. Empty where
// there are none.
std::vector<double> measure_rounding(const VerifyProblem& problem, const Initial& initial,
                                     const std::vector<double>& scales, const Doubtful& doubtful,
                                     Group& group);

}  // namespace isograd
