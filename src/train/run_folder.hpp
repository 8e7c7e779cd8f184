// The folder of a run: one run at a time writes to it, and a new one does not write over another's files.
#pragma once

#include <sys/stat.h>

#include <filesystem>
#include <string>

#include "train/config.hpp"

namespace isograd {

// On rank 0, from the beginning of a run to its end. Holds a lock (flock on run.directory/LOCK), which the
// kernel takes back with the process however it ends; the file says who holds it, or held it last.
class RunFolder {
 public:
  // ConfigError when another run writes to run.directory, or when files of an earlier one lie there and this
  // run neither continues it (checkpoint.resume) nor was told to replace it (RunConfig::overwrite); the same
  // of the folder of the run that it is compared with. Nothing is removed yet.
  explicit RunFolder(const RunConfig& config);
  // Leaves nothing behind where begin() was not called.
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  // The same without taking anything: before ranks are started, so that it is said once.
  static void check_free(const RunConfig& config);

  // This run is about to write: removes an earlier one's files where that was asked for.
  void begin();
  // ConfigError when the folder was removed, moved or replaced since, or its lock removed.
  void check() const;
  bool is_there() const;  // the folder that it began with, though perhaps without its lock
  // What becomes of files that are there, for people; empty: nothing does.
  const std::string& notice() const { return notice_; }
  bool goes_on() const { return goes_on_; }  // from a checkpoint of its own folder

 private:
  struct Continued;
  static Continued continued(const RunConfig& config);
  static void refuse_earlier_run(const RunConfig& config, const Continued& from);
  static void refuse_earlier_comparison(const RunConfig& config, const Continued& from);
  void lock();
  void take(const RunConfig& config, const Continued& from);
  std::filesystem::path directory_, checkpoints_, json_log_;
  bool made_ = false, replaces_ = false, begun_ = false, goes_on_ = false;
  int file_ = -1;
  struct stat folder_ {};
  std::string notice_;
};

// In run.directory: what ranks did before an operation failed, a rank was lost (OperationsFile).
inline constexpr const char* kLastOperations = "last_operations.txt";
// When each rank computed what, where the layers lie in stages (show_stages() in presenter.cpp).
inline constexpr const char* kStageTrace = "stages.json";

// What an earlier run has left in run.directory and would lose to a new one; empty: nothing.
std::string earlier_run(const RunConfig& config);

// Where the metrics of a run go.
std::filesystem::path json_log_of(const RunConfig& config);

}  // namespace isograd
