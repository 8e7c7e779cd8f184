// A stage of the pipeline on its fullest rank: layers, and elements of parameters. Memory and time both
// read it.
#pragma once

#include <vector>

#include "isograd/parameters.hpp"
#include "plan/problem.hpp"

namespace isograd::planner {

struct StageShape {
  std::int64_t first_layer = 0, layers = 0, mixtures = 0;  // of the layers, those with experts
  bool embeds = false, outputs = false;
  // Elements of the fullest rank along tp and ep, by local shapes.
  std::int64_t elements = 0, expert_elements = 0;
  std::int64_t largest_block = 0;  // elements of the largest unit of zero3 that is a block
  std::int64_t root = 0;           // of what is in no block, whole through forward and backward under zero3

  bool operator==(const StageShape&) const = default;
};

// Stages 0 to stages - 1: the layers are those of stage_layers() (parallel/pipeline/stages.hpp).
// Other programs': the output counts as vocabulary * hidden / (4 hidden^2 + 3 hidden * feed_forward) layers,
// the largest stage is as small as possible, and earlier stages have one layer more.
std::vector<StageShape> stage_shapes(const Problem& problem, int tp, int ep, int stages);
std::vector<int> stages_of_rank(const Candidate& candidate, int rank_of_pipeline);

// The input of isograd's formulas of kept and sent bytes, for one rank of the pipeline: by make_plan() of
// train/rules.hpp, as `isograd layout` and `train --memory` do.
DataParallelPlan data_parallel_plan(const Problem& problem, const Candidate& candidate,
                                    const std::vector<StageShape>& stages, int rank_of_pipeline);

}  // namespace isograd::planner
