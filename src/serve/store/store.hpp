// The files of a training server: a journal of accepted requests, snapshots of its state, named checkpoints.
// Plain bytes and folders; no torch, no HTTP.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/files.hpp"

namespace isograd::serve {

// Locks a state folder for one server, and removes what killed ones left half-written in it. ConfigError: in
// use, of a newer version, not writable.
class StateFolder {
 public:
  explicit StateFolder(std::filesystem::path path);
  ~StateFolder();
  StateFolder(const StateFolder&) = delete;
  StateFolder& operator=(const StateFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }
  // Names what is done now, in at most 255 bytes; empty: nothing. A file in memory has the name, so that a
  // kill leaves it for the next process, and it costs no system call. Returns the former name.
  std::string set_doing(std::string_view name);

 private:
  std::filesystem::path path_;
  std::optional<FileLock> lock_;
  char* doing_ = nullptr;  // a byte with the length, then the name
};

// An append-only file of records {u32 length, u32 its checksum, u64 XXH3, bytes}; any thread may append. A
// last record that is not whole (a kill in the middle of a write) is cut off; damage before it is a
// ConfigError. A position counts the bytes of all records that were ever appended; drop_before() does not
// change it.
class Journal {
 public:
  // Replays all whole records first, in order, each with the position that its append() returned. No other
  // Journal may be open on the file: StateFolder's lock sees to that.
  Journal(std::filesystem::path file,
          const std::function<void(std::uint64_t position, std::string_view record)>& replay);
  ~Journal();
  // Returns the position after the record, which a kill does not lose. ConfigError (full disk): nothing was
  // appended, later appends may succeed.
  std::uint64_t append(std::string_view record);
  // A power cut does not lose what was appended before the call. ConfigError: that is not known, because the
  // kernel may have dropped what it could not write, and nothing more is appended: start again.
  void sync();
  static std::uint64_t begin_of(const std::filesystem::path& file);  // the position of its first record
  std::uint64_t position() const;
  // Removes all records before `position` (a snapshot has their effect), which append() returned, or which
  // lies beyond the end, after a power cut. Whole or not at all.
  void drop_before(std::uint64_t position);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Folders that are whole or absent: filled under a hidden name, fsynced, renamed.
class WholeFolder {
 public:
  explicit WholeFolder(std::filesystem::path target);  // an existing target is replaced by commit()
  ~WholeFolder();                                      // not committed: nothing is left
  WholeFolder(const WholeFolder&) = delete;
  WholeFolder& operator=(const WholeFolder&) = delete;
  // Removes what killed processes left in the folder of targets, also of AtomicFiles. No other process may be
  // writing there.
  static void remove_partial(const std::filesystem::path& folder);
  const std::filesystem::path& directory() const { return partial_; }
  void commit();

 private:
  std::filesystem::path target_, partial_;
  bool committed_ = false;
};

// ---- named checkpoints, below <state>/checkpoints ----

struct CheckpointInfo {
  std::string run;   // the model that wrote it: "<session>:train:<n>"
  std::string kind;  // "weights", "sampler_weights", "external_weights"
  std::string name;
  std::string tenant, base, digest{};  // digest: of the base's weights; empty: any do
  std::int64_t rank = 0;               // 0: whole weights
  std::int64_t bytes = 0;
  double created = 0, expires = 0;  // seconds since 1970; 0: never
  std::int64_t operation = 0;       // of the run; that of a later save of the name is larger
  bool is_public = false;
  std::map<std::string, std::string> metadata;

  std::string path() const { return "tinker://" + run + "/" + kind + "/" + name; }
};

// A valid name: 1 to 128 of [A-Za-z0-9._-], neither "." nor "..". Else what is wrong with it, as ConfigError.
void check_checkpoint_name(const std::string& name);
// "tinker://<run>/<kind>/<name>", three parts; a run is 1 to 80 of [A-Za-z0-9._:-] and does not begin with a
// dot. ConfigError.
CheckpointInfo parse_checkpoint_path(const std::string& path);

// For one thread at a time.
class CheckpointStore {
 public:
  explicit CheckpointStore(std::filesystem::path root);  // lists what there is; half-written ones are removed
  // Entries of the folder that are no checkpoint (links, damaged info.json), each as an error's text: not
  // listed, and left where they are.
  const std::vector<std::string>& ignored() const { return ignored_; }
  // In place of a former one. `fill` writes the files and returns their bytes, which the info then has.
  // ConfigError: a full disk (nothing is left).
  CheckpointInfo save(CheckpointInfo info,
                      const std::function<std::int64_t(const std::filesystem::path& directory)>& fill);
  std::filesystem::path directory(const CheckpointInfo& info) const;
  void check_files(const CheckpointInfo& info) const;  // checksums; ConfigError: damaged
  const std::map<std::string, CheckpointInfo>& all() const { return by_path_; }  // by path
  void update(const CheckpointInfo& info);                                       // expiry, public
  void remove(const CheckpointInfo& info);

 private:
  std::filesystem::path root_;
  std::map<std::string, CheckpointInfo> by_path_;
  std::vector<std::string> ignored_;
};

}  // namespace isograd::serve
