// What the stages of a pipeline must agree on: the table, and what goes between them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

#include "isograd/group.hpp"
#include "isograd/pipeline_parallel.hpp"

namespace isograd {

// Collective over the ranks along pp. ConfigError on every rank that names the first one with another table
// than rank 0's; on a rank without a stage, which is named.
void check_same_table(const PipelineTable& table, Group ranks);

// ConfigError unless what `stage` was given by the one before has these sizes, -1 where any will do.
void check_sizes(const at::Tensor& given, const std::vector<std::int64_t>& sizes, int stage,
                 std::int64_t micro_batch);

// ConfigError after a forward that did not call receive() or pass_on(), where the stage has another one
// before it or behind it.
void check_exchanged(bool received, bool passed_on, int stage, int stages, std::int64_t micro_batch);

}  // namespace isograd
