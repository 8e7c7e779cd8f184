// Continues a run: reads the checkpoint's state and checks that this configuration describes the same run.
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
// order of data, the data, the optimizer, the number type and the model's shape are those of the checkpoint.
// ConfigError names the key that differs. Learning rate, number of steps and micro-batches may change.
Resumed resume_run(const Task& task, Group& group);

// Describes a learning rate that differs from the one in the checkpoint's configuration: the first such
// step and the keys. Empty: no difference.
std::string schedule_change(const TrainingState& then, const RunConfig& now);

// Folder of a run's checkpoints.
std::filesystem::path checkpoint_root(const RunConfig& config);

// File in run.directory with the whole configuration: the TOML file, --set and flags.
inline constexpr const char* kRunConfig = "config.toml";

// The shell command that continues from `checkpoint`, using the configuration in run.directory.
std::string resume_command(const RunConfig& config, int ranks, const std::filesystem::path& checkpoint);
// A sentence with that command for a run that failed; empty `checkpoint`: it had saved none.
std::string how_to_continue(const RunConfig& config, int ranks, const std::filesystem::path& checkpoint);
// Throws `error` (a rank was lost, hung or disagreed) again, adding the number of steps made and how to
// continue.
[[noreturn]] void rethrow(const PeerError& error, const RunConfig& config, int ranks, std::int64_t step,
                          const std::filesystem::path& checkpoint);

}  // namespace isograd
