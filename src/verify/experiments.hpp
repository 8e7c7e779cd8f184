// The data of an experiment, made from the data of the step.
#pragma once

#include "verify/diagnosis.hpp"
#include "verify/layout_run.hpp"
#include "verify/oracle.hpp"

namespace isograd {

using DataByRank = std::vector<MicroBatches>;

// Every rank's micro-batches. Collective.
DataByRank gather_batches(const MicroBatches& local, Group& group);
// [rank][micro-batch] targets that carry loss.
std::vector<std::vector<std::int64_t>> counts_of(const DataByRank& data);
// Writes what the declared mean counts in the whole step into dump.counts or dump.amounts, if it counts.
void count_as_declared(const DataByRank& data, const DeclaredLoss& declared, StepDump& dump);
// Ids of the samples in fragments, sorted, once for each fragment.
std::vector<std::int64_t> samples_of(const MicroBatches& batches);
std::vector<std::int64_t> samples_over_ranks(const MicroBatches& local, Group& group);  // collective

// A tensor over the tokens of the batch, of one fragment alone: a view.
inline at::Tensor of_fragment(const at::Tensor& tensor, const Batch& batch, std::size_t fragment) {
  return tensor.slice(0, batch.cu_seqlens[fragment], batch.cu_seqlens[fragment + 1]);
}
// Makes the fragment's row of each of Batch::inputs another one of its type.
void perturb_inputs(Batch& batch, std::int64_t fragment);

// One batch of all fragments, and the fragments [first, last) of one. Neither knows Batch::sample_targets.
Batch joined(const MicroBatches& batches);
Batch fragments_of(const Batch& batch, std::int64_t first, std::int64_t last);

// The step's data as the experiment assigns them, by data rank, before any cut and with sample_targets of the
// new step. Nothing where the step would be unchanged or without a target.
std::optional<DataByRank> arrange(const DataByRank& data, const Experiment& experiment);

// Rank 0's experiment on every rank; nothing: no more of them. Collective.
std::optional<Experiment> share_experiment(std::optional<Experiment> experiment, Group& group);

// Diagnosing a layout on the ranks: rank 0 asks for experiments, all ranks make them.
class Investigation {
 public:
  // Keeps references. `exact`: the layout in fp64, asked when the step is to be made exactly again.
  Investigation(const VerifyProblem& problem, const LayoutUnderTest& layout, const Initial& initial,
                LayoutRun& exact, Group& group)
      : problem_(problem), layout_(layout), initial_(initial), exact_(exact), group_(group) {}

  // Fills in the step, on rank 0, and what the ranks have. Collective.
  void describe(const LayoutRun::RecordedStep& made, StepDump& dump);
  // Collective; the answer is rank 0's, which gives both arguments. `failed`: it is worth experiments.
  std::vector<Finding> diagnose(std::optional<ComparedStep>& compared, bool failed);

 private:
  struct StepData;
  // Collective; nothing where this cannot be run, or on ranks that take no part.
  std::optional<RunPair> again(const Experiment& asked, const StepData& given);

  const VerifyProblem& problem_;
  const LayoutUnderTest& layout_;
  const Initial& initial_;
  LayoutRun& exact_;
  Group& group_;
};

// The oracle's step as a dump. What depends on the layout (counts by rank, axes) is taken from `found`.
StepDump dump_of(const OracleStep& oracle, const Initial& initial, const StepDump& found,
                 std::vector<std::int64_t> samples, double bytes_needed);

}  // namespace isograd
