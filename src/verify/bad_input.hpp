// What verify cannot judge, found before anything is claimed.
#pragma once

#include <string>

#include "verify/layout_run.hpp"

namespace isograd {

// ConfigError when the model runs in its own precision but not in fp64, or computes something in another
// type there.
void refuse_without_fp64(const VerifyModel& in_fp64, const VerifyModel& own, const MicroBatches& whole);

// How two runs of the first micro-batch that has a target differ; "" when all bits are the same.
std::string difference_of_two_runs(const VerifyModel& model, const MicroBatches& whole);

// ConfigError on all ranks when rank 0 has not the memory for the oracle: how much it takes, and how many
// layers would fit. Collective.
void refuse_without_memory(const VerifyProblem& problem, const Initial& initial, Group& group);

// Bytes that the oracle takes for parameters, gradients and the copies it compares, all in fp64.
std::int64_t oracle_bytes(const Initial& initial);

}  // namespace isograd
