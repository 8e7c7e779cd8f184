// When the ranks of a pipeline computed what, for people: beside what their table plans, and as a trace.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "isograd/pipeline_parallel.hpp"
#include "isograd/world.hpp"
#include "train/task.hpp"

namespace isograd {

// Of the last step of rank 0's pipeline: two pictures, as measured and as the table plans with the measured
// times of its stages, their bubbles in the captions. Pure.
std::vector<Showing::Picture> stage_pictures(const Pipeline::Measured& measured);

// The same of all ranks in Chrome's trace format (chrome://tracing, Perfetto): a process for each rank, an
// event for each action, in microseconds. `measured` by each pipeline's ranks. Collective over mesh.all();
// the text is rank 0's.
std::string stage_trace(const std::optional<Pipeline::Measured>& measured, const Mesh& mesh);

// Writes the trace into the run's folder and returns the pictures, both at the end of a run. Collective.
std::vector<Showing::Picture> show_stages(const Pipeline& pipeline, const Mesh& mesh,
                                          const std::filesystem::path& directory);

}  // namespace isograd
