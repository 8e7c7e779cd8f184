// Continuing a run: the checkpoint's state, and that this configuration describes the same run.
#pragma once

#include <filesystem>
#include <string>

#include "isograd/checkpoint.hpp"
#include "train/build.hpp"

namespace isograd {

// The state that a run with this configuration and corpus starts from (step 0).
TrainingState fresh_state(const RunConfig& config, const Corpus& corpus);

struct Resumed {
  std::filesystem::path directory;
  TrainingState state;
};

// Collective: rank 0 resolves checkpoint.resume and checks every checksum; then every rank checks that the
// order of data, the corpus, the optimizer, the number type and the model's shape are those of the
// checkpoint. ConfigError names the key that differs. Learning rate, number of steps and micro-batches may
// change.
Resumed resume_run(const RunConfig& config, const Corpus& corpus, Group& group);

// Folder of a run's checkpoints.
std::filesystem::path checkpoint_root(const RunConfig& config);

// The command line that continues from `checkpoint`.
std::string resume_command(const RunConfig& config, int ranks, const std::filesystem::path& checkpoint);

}  // namespace isograd
