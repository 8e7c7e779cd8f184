// Pipelines by isograd's own simulator, each kind once.
#pragma once

#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "isograd/pipeline_parallel.hpp"
#include "isograd/planner.hpp"

namespace isograd::planner {

// Seconds of a micro-batch in each stage, and of a transfer between ranks.
using StageTimes = PipelineTimes;

class Pipelines {
 public:
  // From the first forward to the end of the last backward. Simulated for up to 4 * pp micro-batches and as
  // many more as make another period; beyond that the length grows by one period at a time, as the
  // simulator's does (test: equal to 1e-9 up to 4 million forwards). Micro-batches are rounded up where the
  // schedule needs a multiple.
  double seconds(const Candidate& candidate, const StageTimes& times);
  // The most that a rank of the pipeline has alive, from the order of its own actions: `kept` of each stage
  // from a forward to its backward (between the halves of one `between_halves` of it), and `passing` of the
  // stage whose backward or first half runs, `passing_weights` of a second half. All as bytes, by stage.
  double most_kept(const Candidate& candidate, int rank_of_pipeline, const std::vector<double>& kept,
                   const std::vector<double>& between_halves, const std::vector<double>& passing,
                   const std::vector<double>& passing_weights);
  // The whole timeline, for printing.
  PipelineTimeline timeline(const Candidate& candidate, const StageTimes& times, PipelineTable& table);

 private:
  using Key = std::tuple<Schedule, int, int, std::int64_t>;  // ranks, stages on each, micro-batches
  static Key key_of(const Candidate& candidate, std::int64_t micro_batches) {
    return {candidate.schedule, candidate.pp, candidate.stages_per_rank, micro_batches};
  }
  const PipelineTable& table(const Candidate& candidate, std::int64_t micro_batches);
  double length(const Candidate& candidate, const StageTimes& times, std::int64_t micro_batches);

  std::map<Key, PipelineTable> tables_{};
  std::size_t actions_ = 0;
  std::map<std::pair<Key, std::vector<double>>, double> lengths_{};
};

}  // namespace isograd::planner
