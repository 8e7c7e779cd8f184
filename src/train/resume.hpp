// Continuing a run: the checkpoint's state, and that this configuration describes the same run.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "isograd/checkpoint.hpp"
#include "isograd/error.hpp"
#include "train/task.hpp"

namespace isograd {

// The state that a run of this task starts from (step 0).
TrainingState fresh_state(const Task& task);

struct Resumed {
  std::filesystem::path directory;
  TrainingState state;
};

// Collective: rank 0 resolves checkpoint.resume and checks every checksum; then every rank checks that the
// order of data, the data, the optimizer, the number type and the model's shape are those of the
// checkpoint. ConfigError names the key that differs. Learning rate, number of steps and micro-batches may
// change.
Resumed resume_run(const Task& task, Group& group);

// That the learning rate is another than the checkpoint's own configuration would have given, from which step
// and by which keys; empty when it is the same.
std::string schedule_change(const TrainingState& then, const RunConfig& now);

// Folder of a run's checkpoints.
std::filesystem::path checkpoint_root(const RunConfig& config);
// Of a run, whose own folder is not made anew where it has gone. `placed` as in SaveOptions.
SaveOptions save_options(const RunConfig& config, const Layout* placed);

// In run.directory: everything that the run was configured with, by its file, --set and flags.
inline constexpr const char* kRunConfig = "config.toml";

// The command line that continues from `checkpoint`, for a shell: by the configuration in run.directory.
std::string resume_command(const RunConfig& config, int ranks, const std::filesystem::path& checkpoint);
// The same in a sentence about a run that failed; empty `checkpoint`: it had saved none.
std::string way_back(const RunConfig& config, int ranks, const std::filesystem::path& checkpoint);
// `error`, a rank that was lost, hung or disagreed, with the steps made until then and the way back.
[[noreturn]] void rethrow(const PeerError& error, const RunConfig& config, int ranks, std::int64_t step,
                          const std::filesystem::path& checkpoint);

}  // namespace isograd
