// Diagnosing a layout on the ranks: rank 0 asks for experiments, all ranks make them.
#pragma once

#include "verify/diagnosis.hpp"
#include "verify/experiments.hpp"
#include "verify/heartbeat.hpp"
#include "verify/layout_run.hpp"
#include "verify/oracle.hpp"

namespace isograd {

class Investigation {
 public:
  // Keeps references. `exact`: the layout in fp64, asked when the step is to be made exactly again.
  Investigation(const VerifyProblem& problem, const LayoutUnderTest& layout, const Initial& initial,
                LayoutRun& exact, Group& group)
      : problem_(problem), layout_(layout), initial_(initial), exact_(exact), group_(group) {}

  // Fills in what the step said, on rank 0, and what the ranks have. Collective.
  void describe(const LayoutRun::RecordedStep& made, StepDump& dump);
  // Collective; the answer is rank 0's. `failed` (rank 0's) says whether it is worth experiments.
  std::vector<Finding> diagnose(RunPair pair, bool failed);

 private:
  // A step's data before any cut, by data rank, and which of them each place in `counting` works on: of ranks
  // that hold a model together each has the same.
  struct StepData {
    DataByRank data;
    std::vector<int> data_rank;
  };
  static StepData step_data_of(const VerifyProblem& problem, Group counting);  // collective
  // Ranks of the experiment become data ranks. False: it makes no sense there.
  static bool by_data_rank(Experiment& experiment, const StepData& step_data);
  // What `rank` alone adds of `data`: its micro-batches, or its part of those that several ranks share.
  static bool leave_only(DataByRank& data, const VerifyProblem& problem, const StepData& step_data, int rank,
                         int micro_batch, Group counting);

  // Collective; nothing where this cannot be run, or on ranks that take no part.
  std::optional<RunPair> again(const Experiment& experiment);

  const VerifyProblem& problem_;
  const LayoutUnderTest& layout_;
  const Initial& initial_;
  LayoutRun& exact_;
  Group& group_;
  StepData step_data_;
};

// The oracle's step as a dump. What depends on the layout (counts by rank, axes) is taken from `found`.
StepDump dump_of(const OracleStep& oracle, const Initial& initial, const StepDump& found,
                 std::vector<std::int64_t> samples, double bytes_needed);
// xxHash of the initial bits of the trainable parameters.
std::vector<std::uint64_t> checksums_of(const Initial& initial);

}  // namespace isograd
