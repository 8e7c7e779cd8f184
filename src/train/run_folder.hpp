// The folder of a run: one run at a time writes to it, a new one does not write over another's files, and a
// run continues from its checkpoints.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "base/files.hpp"
#include "isograd/checkpoint.hpp"
#include "isograd/error.hpp"
#include "train/config.hpp"
#include "train/task.hpp"

namespace isograd {

// Rank 0 holds one for the whole run, with a flock on run.directory/LOCK, which names its holder.
class RunFolder {
 public:
  // ConfigError if another run writes to run.directory, or an earlier one's files are in it, or in the folder
  // of the run to compare with, and this run neither continues it nor may replace it. Nothing is removed yet.
  explicit RunFolder(const RunConfig& config);
  // Leaves nothing behind where begin() was not called.
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  // The same checks without the lock, before ranks are started.
  static void check_free(const RunConfig& config);

  // This run is about to write: removes an earlier one's files where that was asked for.
  void begin();
  // ConfigError when the folder was removed, moved or replaced since, or its lock removed.
  void check() const;
  bool is_there() const;  // the folder that it began with, though perhaps without its lock
  // Human-readable notice of what happens to existing files; empty: nothing.
  const std::string& notice() const { return notice_; }
  bool goes_on() const { return goes_on_; }  // from a checkpoint of its own folder

 private:
  struct Continued;
  static Continued checked(const RunConfig& config);
  static void refuse_earlier_run(const RunConfig& config, const Continued& from);
  void lock();
  void take(const RunConfig& config, const Continued& from);
  std::filesystem::path directory_, checkpoints_, json_log_;
  bool made_ = false, replaces_ = false, begun_ = false, goes_on_ = false;
  std::optional<FileLock> lock_;
  struct stat folder_ {};
  std::string notice_;
};

// In run.directory: what ranks did before an operation failed, a rank was lost (OperationsFile).
inline constexpr const char* kLastOperations = "last_operations.txt";
// Times of each rank's computations in a run with pipeline stages (show_stages() in presenter.cpp).
inline constexpr const char* kStageTrace = "stages.json";

// File for the metrics of a run.
std::filesystem::path json_log_of(const RunConfig& config);

// ---- continuing a run ----

// The state that a run of this task starts from (step 0).
TrainingState fresh_state(const Task& task);

struct Resumed {
  std::filesystem::path directory;
  TrainingState state;
};

// Collective. Nothing: a new run, because checkpoint.resume is empty, or "auto" and rank 0 finds no complete
// checkpoint. Rank 0 checks every checksum; then every rank checks that what the order of data and the
// meaning of tensors depend on is as in the checkpoint. ConfigError names the key that differs.
std::optional<Resumed> resume_run(const Task& task, Group& group);

// The first step with another learning rate than the checkpoint's run would have had, and the keys. Empty:
// none.
std::string schedule_change(const TrainingState& then, const RunConfig& now);

// Folder of a run's checkpoints.
std::filesystem::path checkpoint_root(const RunConfig& config);

// File in run.directory with the whole configuration: the TOML file, --set and flags.
inline constexpr const char* kRunConfig = "config.toml";

// The command that continues from `checkpoint` with the configuration in run.directory.
std::string resume_command(const RunConfig& config, int ranks, const std::filesystem::path& checkpoint);
// A sentence with that command for a run that failed; empty `checkpoint`: it had saved none.
std::string how_to_continue(const RunConfig& config, int ranks, const std::filesystem::path& checkpoint);
// Throws `error` (a rank was lost) again, with the number of steps made and how to continue.
[[noreturn]] void rethrow(const PeerError& error, const RunConfig& config, int ranks, std::int64_t step,
                          const std::filesystem::path& checkpoint);

}  // namespace isograd
