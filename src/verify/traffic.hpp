// What a run's layout should send for gradients and parameters, by its plan.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "isograd/verify.hpp"
#include "train/build.hpp"
#include "train/memory.hpp"

namespace isograd {

// What ZeRO-3 gathers of the model, whose parameters are this rank's part of it: each unit, with the padding
// of its flat storage. Counted here and not asked of the layout, because the layout is what is checked.
// Nothing where the formula does not hold: parameters that are gathered but not trained, blocks that forward
// uses several times.
std::optional<std::vector<SummedElements>> gathered_by(const VerifyModel& model, const RunConfig& config,
                                                       const Grid& grid, int rank);

// LayoutUnderTest::traffic of the configured strategy. `gathered` of stage 3; none: not claimed.
std::pair<double, double> traffic_by_plan(const RunConfig& config, const RanksOfRun& ranks,
                                          DataParallel& layout,
                                          const std::optional<std::vector<SummedElements>>& gathered,
                                          std::int64_t rounds, at::ScalarType dtype);

}  // namespace isograd
