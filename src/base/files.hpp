// Files that are whole or absent: written beside, fsynced, renamed; and checksums.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace isograd {

// ConfigError unless there is a regular file, or nothing, behind the path: renaming a file over a device or a
// pipe would take it away, and opening a pipe may wait for ever.
void check_replaceable(const std::filesystem::path& path);

// Writes to a hidden sibling of `path` (of the file that it links to); commit() fsyncs it, renames it over
// `path` and fsyncs the folder. Destroyed without commit() it leaves nothing. Errors (full disk, no
// permission) are ConfigErrors that name the path, the bytes wanted and the bytes free.
class AtomicFile {
 public:
  explicit AtomicFile(std::filesystem::path path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  void write(const void* data, std::size_t bytes);
  void write(std::string_view text) { write(text.data(), text.size()); }
  void write_at(std::uint64_t offset, const void* data, std::size_t bytes);
  std::uint64_t position() const { return position_; }
  void commit();

 private:
  std::filesystem::path path_;
  std::filesystem::path partial_;
  int file_ = -1;
  std::uint64_t position_ = 0;
};

void write_file(const std::filesystem::path& path, std::string_view text);  // atomically
// Whole; ConfigError when it cannot, and before anything is read of a file with more than `most` bytes.
std::string read_file(const std::filesystem::path& path, std::uint64_t most = std::uint64_t{1} << 30);

// ConfigError where writing `output`, of the named option, would replace an input: it is one of `inputs`, by
// whatever path, or one of the files (.json, .safetensors) of a folder among them.
void check_no_input(const std::string& option, const std::filesystem::path& output,
                    const std::vector<std::filesystem::path>& inputs);

// A file to lock with flock(), opened for reading and writing and made if it is not there; -1 and errno.
// Whoever may read a file may hold such a lock on it, so only those may read it who may also write it.
int open_lock(const std::filesystem::path& path);

void fsync_directory(const std::filesystem::path& directory);

// XXH3-64 as 16 hex digits.
std::string checksum(const void* data, std::size_t bytes);
std::string checksum_file(const std::filesystem::path& path);

// A read-only mapping of a whole file. Empty files map to nothing.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  const std::uint8_t* data() const { return data_; }
  std::size_t size() const { return size_; }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  const std::uint8_t* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace isograd
