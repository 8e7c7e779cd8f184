// What is known of a kind of run (model.kind) from its configuration alone, before any data is read: its
// keys, what it calls its batches, what it refuses. Beside each Task one of these; nothing else asks for the
// kind.
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

// As batch.tokens_per_micro_batch: everything at once. The most that a file may say.
inline constexpr std::int64_t kAllTokens = 1'000'000'000;

struct TaskKind {
  const char* name;     // model.kind
  const char* samples;  // that a global batch consists of: the key is batch.SAMPLES_per_step
  const char* tokens;   // that these consist of, as batch.max_tokens_per_rank counts them
  const char* smaller;  // what makes a micro-batch smaller, for people
  std::int64_t (*samples_per_step)(const RunConfig& config);
  std::vector<ConfigKey> (*keys)();  // its own, by section
  // Keys that have no effect in its runs, and its own that have none in others'.
  std::vector<UnusedKeys> unused{}, of_no_other{};
  // ConfigErrors: of the configuration by itself, and of what it asks of so many ranks.
  void (*check)(const RunConfig& config){};
  void (*check_ranks)(const RunConfig& config, int ranks){};
  // The configuration itself and, where a rank has several samples, the one that cuts a rank's part of the
  // step otherwise: into one micro-batch, or a sample at a time where it is one already. What tells them
  // apart, for people: "2 to a micro-batch".
  std::vector<RunConfig> (*accumulations)(const RunConfig& config, int ranks);
  std::string (*accumulation_text)(const RunConfig& config);
  // The views of tp that the placements of its model ask for. Null: none.
  Grid (*view)(const RunConfig& config, const Grid& grid){};
  // Task::comparison(), by the configuration alone. Null: none.
  std::optional<RunConfig> (*comparison)(const RunConfig& config){};
  bool on_gpu = true;       // whether it has code for one
  bool cuts_tokens = true;  // whether parallel.sequence_parallel means anything to it
  std::unique_ptr<Task> (*make)(const RunConfig& config, Group& group);
  // model_without_values() where it depends on no data; null: the task makes it.
  std::shared_ptr<TaskModel> (*model_without_values)(const RunConfig& config){};
};

// What the ranks along tp deal among themselves of a block.
struct DealtOverTp {
  std::int64_t heads = 0, key_heads = 0;  // 0: it has none
  std::vector<std::pair<const char*, std::int64_t>> others{};
};
// For check_ranks. ConfigError unless each rank along tp has something of everything, and Ulysses can deal
// out the heads of each further.
void check_dealt(const RunConfig& config, const DealtOverTp& dealt);

const std::vector<const TaskKind*>& task_kinds();
const TaskKind& kind_of(const RunConfig& config);  // ConfigError where there is none of that name

// The kinds.
const TaskKind& text_kind();
const TaskKind& scorer_kind();
const TaskKind& video_kind();

}  // namespace isograd
