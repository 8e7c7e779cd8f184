// Files that are whole or absent (written to a temporary name, fsynced, renamed), and checksums.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "base/refuse.hpp"

namespace isograd {

// Throws the ConfigError of an operation ("open", "write", ...) on `path` that failed with errno `code`; on a
// full disk with the bytes free and the bytes left to write.
[[noreturn]] void refuse_file(const std::string& operation, const fs::path& path, int code,
                              std::uint64_t to_write = 0);

// ConfigError unless the path is a regular file or absent. Renaming a file over a device or pipe would remove
// it, and opening a pipe may wait for ever.
void check_replaceable(const fs::path& path);

// Writes to a hidden sibling of `path` (of the target, if `path` is a link). commit() fsyncs it, renames it
// over `path` and fsyncs the folder. Destroyed without commit() it leaves nothing. Errors (full disk, no
// permission) are ConfigErrors with the path, the bytes to write and the bytes free.
class AtomicFile {
 public:
  explicit AtomicFile(fs::path path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  void write(const void* data, std::size_t bytes);
  void write(std::string_view text) { write(text.data(), text.size()); }
  void write_at(std::uint64_t offset, const void* data, std::size_t bytes);
  std::uint64_t position() const { return position_; }
  void commit();

 private:
  fs::path path_;
  fs::path partial_;
  int file_ = -1;
  std::uint64_t position_ = 0;
};

void write_file(const fs::path& path, std::string_view text);  // atomically
// The whole file. ConfigError when it cannot be read; a file of more than `most` bytes is refused unread.
std::string read_file(const fs::path& path, std::uint64_t most = std::uint64_t{1} << 30);

// ConfigError if writing `output` (of the named option) would replace an input: one of `inputs`, by any path,
// or a file (.json, .safetensors) of a folder among them.
void check_no_input(const std::string& option, const fs::path& output, const std::vector<fs::path>& inputs);

// Opens a file to lock with flock(), for reading and writing, and creates it if needed. Returns -1 and sets
// errno on failure. Any reader of a file may lock it, so only its writers may read it.
int open_lock(const fs::path& path);

// Keeps other processes, and other locks of this one, out while it lives (flock). It never waits.
class FileLock {
 public:
  explicit FileLock(const fs::path& path);  // creates the file if needed
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;
  int problem() const { return problem_; }  // 0: held; EWOULDBLOCK: another holds it; else why there is none
  int file() const { return file_; }        // -1: it could not be opened

 private:
  int file_ = -1, problem_ = 0;
};

void fsync_directory(const fs::path& directory);
// All files and folders below `directory`, then itself.
void fsync_all(const fs::path& directory);

// XXH3-64 as 16 hex digits.
std::string checksum(const void* data, std::size_t bytes);
std::string checksum_file(const fs::path& path);

// A read-only mapping of a whole file. An empty file maps to nothing.
class MappedFile {
 public:
  explicit MappedFile(const fs::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  const std::uint8_t* data() const { return data_; }
  std::size_t size() const { return size_; }
  const fs::path& path() const { return path_; }
  // Takes the whole pages of this part out of the process's memory. The next access reads the file again.
  void release(std::size_t begin, std::size_t bytes) const;

 private:
  fs::path path_;
  const std::uint8_t* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace isograd
