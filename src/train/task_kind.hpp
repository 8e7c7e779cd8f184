// Properties of a kind of run (model.kind) that need no data: its keys, the names of its batches, its
// checks. Each Task has one; nothing else tests the kind.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "isograd/group.hpp"
#include "train/config_table.hpp"

namespace isograd {

class Task;
class TaskModel;

// Value of batch.tokens_per_micro_batch for everything at once; the largest that a file may contain.
inline constexpr std::int64_t kAllTokens = 1'000'000'000;

struct TaskKind {
  const char* name;     // model.kind
  const char* samples;  // elements of a global batch: the key is batch.SAMPLES_per_step
  const char* tokens;   // parts of these, which batch.max_tokens_per_rank counts
  const char* smaller;  // human-readable keys that make a micro-batch smaller
  std::int64_t decltype(RunConfig::batch)::*per_step;  // the field of batch.SAMPLES_per_step
  std::vector<ConfigKey> (*keys)();                    // its own, by section
  // Keys that have no effect in its runs, and its own keys, which have no effect in other runs.
  std::vector<UnusedKeys> unused{}, of_no_other{};
  // Checks of the configuration alone and for a number of ranks. ConfigError.
  void (*check)(const RunConfig& config){};
  void (*check_ranks)(const RunConfig& config, int ranks){};
  // The configuration itself and, if a rank has several samples, one that splits a rank's part of the step
  // differently: into one micro-batch, or into one sample each if it is one already. accumulation_text() is
  // a human-readable name: "2 to a micro-batch".
  std::vector<RunConfig> (*accumulations)(const RunConfig& config, int ranks);
  std::string (*accumulation_text)(const RunConfig& config);
  // The views of tp that the model's placements need. Null: none.
  Grid (*view)(const RunConfig& config, const Grid& grid){};
  // A run that a finished one is compared with, in a folder inside run.directory. Null: none.
  std::optional<RunConfig> (*comparison)(const RunConfig& config){};
  bool on_gpu = true;       // it supports GPUs
  bool cuts_tokens = true;  // parallel.sequence_parallel has an effect
  std::unique_ptr<Task> (*make)(const RunConfig& config, Group& group);
  // model_without_values() where it depends on no data; null: the task makes it.
  std::shared_ptr<TaskModel> (*model_without_values)(const RunConfig& config){};

  std::int64_t samples_per_step(const RunConfig& config) const { return config.batch.*per_step; }
};

// Numbers of heads and features of a block that the ranks along tp split.
struct SplitOverTp {
  std::int64_t heads = 0, key_heads = 0;  // 0: it has none
  std::vector<std::pair<const char*, std::int64_t>> others{};
};
// For check_ranks. ConfigError unless each rank along tp gets at least one of everything, and Ulysses can
// split the heads of each rank further.
void check_tensor_parallel(const RunConfig& config, const SplitOverTp& split);

const std::vector<const TaskKind*>& task_kinds();
const TaskKind& kind_of(const RunConfig& config);  // ConfigError where there is none of that name

// The kinds.
const TaskKind& text_kind();
const TaskKind& scorer_kind();
const TaskKind& video_kind();

}  // namespace isograd
