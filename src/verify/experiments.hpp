// The data of an experiment, made from the data of the step.
#pragma once

#include <optional>
#include <vector>

#include "isograd/batch.hpp"
#include "isograd/group.hpp"
#include "isograd/verify.hpp"
#include "verify/diagnosis.hpp"

namespace isograd {

using DataByRank = std::vector<MicroBatches>;

// Every rank's micro-batches. Collective.
DataByRank gather_batches(const MicroBatches& local, Group& group);
// [rank][micro-batch] targets that carry loss.
std::vector<std::vector<std::int64_t>> counts_of(const DataByRank& data);
// What the declared mean counts in each, into dump.counts or dump.amounts: all known causes speak of that.
// Nothing under means that count nothing, or differ over ranks. `data` is the whole step.
void count_as_declared(const DataByRank& data, const DeclaredLoss& declared, StepDump& dump);
// Ids of the samples in fragments, sorted, once for each fragment.
std::vector<std::int64_t> samples_of(const MicroBatches& batches);
std::vector<std::int64_t> samples_over_ranks(const MicroBatches& local, Group& group);  // collective
MicroBatches all_of(const DataByRank& data);

// Makes the fragment's row of each of Batch::inputs another one, of its type and in its range if whole
// numbers.
void perturb_inputs(Batch& batch, std::int64_t fragment);

// One batch of all fragments, and the fragments [first, last) of one. Neither knows Batch::sample_targets.
Batch joined(const MicroBatches& batches);
Batch fragments_of(const Batch& batch, std::int64_t first, std::int64_t last);

// The step's data, by data rank and before any cut, as the experiment deals them out (all but only_axis and
// the circumstances of the run); Batch::sample_targets are those of the new step. Nothing
// where that would be the step as it is, although the experiment asks for other data, or would have no
// target.
std::optional<DataByRank> arrange(const DataByRank& data, const Experiment& experiment);

// Rank 0's experiment on every rank; nothing: no more of them. Collective.
std::optional<Experiment> share_experiment(const std::optional<Experiment>& experiment, Group& group);

}  // namespace isograd
