// Pipelines, their stages, and the memory of the rank that needs most at the moment that needs most.
#pragma once

#include <array>
#include <map>
#include <ranges>
#include <tuple>
#include <utility>
#include <vector>

#include "isograd/parameters.hpp"
#include "isograd/pipeline_parallel.hpp"
#include "plan/problem.hpp"

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

// A stage on its fullest rank: layers, and elements of parameters.
struct StageShape {
  std::int64_t layers = 0, mixtures = 0;  // of the layers, those with experts
  bool embeds = false, outputs = false;
  // Elements of the fullest rank along tp and ep, by local shapes.
  std::int64_t elements = 0, expert_elements = 0;
  std::int64_t largest_block = 0;  // elements of the largest unit of zero3 that is a block
  std::int64_t root = 0;           // of what is in no block, whole through forward and backward under zero3

  bool operator==(const StageShape&) const = default;
};

// Parameters of a layer on the fullest rank along tp, without the routed experts, and of one of those.
struct LayerElements {
  double rest = 0, expert = 0;
};
LayerElements elements_of(const ModelShape& model, std::int64_t key_value_heads, std::int64_t tp,
                          bool mixture);

// Stages 0 to stages - 1: the layers are those of stage_layers() (parallel/pipeline/stages.hpp).
// Other programs': the output counts as vocabulary * hidden / (4 hidden^2 + 3 hidden * feed_forward) layers,
// the largest stage is as small as possible, and earlier stages have one layer more.
std::vector<StageShape> stage_shapes(const Problem& problem, int tp, int ep, int stages);
// The stage that is number `part` of a rank's.
inline std::size_t stage_of(const Candidate& candidate, int rank_of_pipeline, int part) {
  const bool back = candidate.schedule == Schedule::kZeroBubbleV && part == 1;  // of the V
  return std::size_t(back ? 2 * candidate.pp - 1 - rank_of_pipeline : rank_of_pipeline + part * candidate.pp);
}
inline auto stages_of_rank(const Candidate& candidate, int rank_of_pipeline) {
  return std::views::iota(0, candidate.stages_per_rank) |
         std::views::transform([&candidate, rank_of_pipeline](int part) {
           return stage_of(candidate, rank_of_pipeline, part);
         });
}

// The input of isograd's formulas of kept and sent bytes, for one rank of the pipeline: by make_plan() of
// train/rules.hpp, as `isograd layout` and `train --memory` do.
DataParallelPlan data_parallel_plan(const Problem& problem, const Candidate& candidate,
                                    const std::vector<StageShape>& stages, int rank_of_pipeline);

// Keeps what candidates share: stages by (tp, ep, stages), a layer's bytes by (tp, cp, micro-batch,
// precision). 0.3 us a candidate once these are there.
class MemoryModel {
 public:
  MemoryModel(const Problem& problem, Pipelines& pipelines)
      : problem_(problem), pipelines_(pipelines), config_(decoder_of(problem.model)) {}

  MemoryParts of(const Candidate& candidate);
  MemoryParts of_rank(const Candidate& candidate, int rank_of_pipeline);
  // At most of(candidate).total(), cheaper, and no less with larger micro-batches: for leaving out.
  double least(const Candidate& candidate) { return kept(candidate) + least_beyond_kept(candidate); }
  // The first rank's bytes from step to step, which micro-batches do not change, and the least of the others.
  double kept(const Candidate& candidate);
  double least_beyond_kept(const Candidate& candidate);
  // The parts with formulas and origins.
  std::vector<Planned::Part> explain(const Candidate& candidate, const MemoryParts& parts);
  const std::vector<StageShape>& stages(const Candidate& candidate);

 private:
  // Bytes of a micro-batch: of a block without and with experts, of what a stage has once, of the output.
  struct MicroBatch {
    std::array<double, 2> kept{}, halves{}, passing{}, passing_weights{};
    double pass = 0, stream = 0, output = 0, logits = 0;
    double output_halves = 0, output_passing = 0, output_passing_weights = 0;
  };
  // Kept by a micro-batch of a stage, between the halves of its backward too, and what passes in the fullest
  // moment of a backward or its first half, and of its second: the output's, or a block's when the output's
  // tensors are gone, or the embedding's gradient at the end.
  struct OfStage {
    double kept = 0, halves = 0, logits = 0, passing = 0, passing_weights = 0;
  };
  const MicroBatch& micro_batch(const Candidate& candidate);
  OfStage of_stage(const Candidate& candidate, const StageShape& shape, const MicroBatch& bytes) const;
  bool is_like_before(const Candidate& candidate, int rank);
  MemoryParts isograds(const Candidate& candidate, int rank);
  MemoryParts others(const Candidate& candidate, int stage);

  const Problem& problem_;
  Pipelines& pipelines_;
  const DecoderConfig config_;
  std::map<std::tuple<int, int, int>, std::vector<StageShape>> shapes_{};
  std::tuple<int, int, int> last_key_{};
  const std::vector<StageShape>* last_shapes_ = nullptr;  // candidates of a mesh come together
  std::map<std::array<std::int64_t, 7>, MicroBatch> micro_batches_{};
};

}  // namespace isograd::planner
