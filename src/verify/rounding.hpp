// What rounding costs one process on a parameter of few elements: the step in the run's precision, in several
// cuts of the batch.
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

// A parameter that one run did not clear: its place among the trainable ones.
struct Doubtful {
  std::vector<std::size_t> places;
  std::int64_t runs = 0;  // what the smallest of them takes
};

// The largest ‖g1 − g64‖ / s of each of them over the runs, on rank 0. Collective: rank 0 says which; the
// last rank makes the step as one process would, each time in another cut, with as many micro-batches as all
// ranks have together; where the loss is one over all rows, each time in another order of the samples of each
// micro-batch. Empty where there are none, or such a loss depends on the order.
std::vector<double> measure_rounding(const VerifyProblem& problem, const Initial& initial,
                                     const OracleStep& oracle, const std::vector<double>& scales,
                                     Doubtful doubtful, Group& group);

}  // namespace isograd
