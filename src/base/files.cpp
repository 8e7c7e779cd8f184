#include "files.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/paths.hpp"
#include "base/refuse.hpp"
#include "isograd/error.hpp"

namespace isograd {

void refuse_file(const std::string& operation, const fs::path& path, int code, std::uint64_t to_write) {
  const bool reads = operation == "open" || operation == "map";
  ErrorText text{.where = operation + " " + path.string(),
                 .found = std::strerror(code),
                 .expected = reads ? "a file that can be read" : "a file that can be written",
                 .action = "Look at the path and at its permissions"};
  if (code == ENOSPC || code == EFBIG || code == EDQUOT) {
    struct statvfs disk {};
    if (statvfs(path.parent_path().empty() ? "." : path.parent_path().c_str(), &disk) == 0)
      text.found +=
          fmt::format(" ({} bytes free, {} more to write)", disk.f_bavail * disk.f_frsize, to_write);
    text.action = "Free space, raise the limit or choose another directory";
  } else if (code == ENOENT || code == ENOTDIR || code == ENAMETOOLONG) {
    std::error_code error;
    const auto folder = path.parent_path();
    const bool in_folder = folder.empty() || fs::is_directory(folder, error);
    text.found = in_folder ? "no such file" : "no folder " + folder.string();
    text.action = missing_path_action(path);
  }
  throw ConfigError(text);
}

namespace {

void write_all(int file, const void* data, std::size_t bytes, std::uint64_t offset, const fs::path& path) {
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t done = pwrite(file, from, bytes, static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) refuse_file("write", path, done == 0 ? ENOSPC : errno, bytes);
    from += done, bytes -= static_cast<std::size_t>(done), offset += static_cast<std::uint64_t>(done);
  }
}

// The target of a link, so that the file there is replaced and not the link.
fs::path behind_links(fs::path path) {
  std::error_code error;
  if (!fs::is_symlink(path, error)) return path;
  fs::path target = fs::weakly_canonical(path, error);
  return error ? path : target;
}

}  // namespace

void check_replaceable(const fs::path& path) {
  std::error_code error;
  const auto status = fs::status(path, error);
  if (!fs::exists(status) || fs::is_regular_file(status) || fs::is_directory(status)) return;
  refuse("write " + path.string(), "something that is not a regular file (a device, a pipe)",
         "a regular file, or a path where there is none: it is written to a temporary name and renamed",
         "Name another file");
}

AtomicFile::AtomicFile(fs::path path) : path_(behind_links(std::move(path))) {
  check_replaceable(path_);
  static std::atomic<unsigned> serial{0};
  partial_ =
      path_.parent_path() / fmt::format(".{}.partial-{}-{}", path_.filename().string(), getpid(), serial++);
  file_ = open(partial_.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0644);
  if (file_ < 0) refuse_file("create", path_, errno);
}

AtomicFile::~AtomicFile() {
  if (file_ < 0) return;
  close(file_);
  unlink(partial_.c_str());
}

void AtomicFile::write(const void* data, std::size_t bytes) {
  write_all(file_, data, bytes, position_, path_);
  position_ += bytes;
}

void AtomicFile::write_at(std::uint64_t offset, const void* data, std::size_t bytes) {
  write_all(file_, data, bytes, offset, path_);
  position_ = std::max(position_, offset + bytes);
}

void AtomicFile::commit() {
  if (fsync(file_) != 0) refuse_file("fsync", path_, errno);
  const auto check = [&](const char* operation, int result) {
    if (result == 0) return;
    const int code = errno;
    unlink(partial_.c_str());
    refuse_file(operation, path_, code);
  };
  check("close", close(std::exchange(file_, -1)));
  check("rename", rename(partial_.c_str(), path_.c_str()));
  fsync_directory(path_.parent_path());
}

void write_file(const fs::path& path, std::string_view text) {
  AtomicFile file(path);
  file.write(text);
  file.commit();
}

std::string read_file(const fs::path& path, std::uint64_t most) {
  MappedFile file(path);
  if (file.size() > most)
    refuse(path.string(), "a file of " + std::to_string(file.size()) + " bytes",
           "at most " + std::to_string(most), "Check that this is the file that you meant");
  return {reinterpret_cast<const char*>(file.data()), file.size()};
}

int open_lock(const fs::path& path) {
  const int file = ::open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
  struct stat status {};
  if (file < 0 || ::fstat(file, &status) != 0 || status.st_uid != ::geteuid()) return file;
  // An earlier version made the file, or a umask did not narrow its mode.
  mode_t mode = status.st_mode & 07777;
  if ((mode & S_IWGRP) == 0) mode &= ~static_cast<mode_t>(S_IRGRP);
  if ((mode & S_IWOTH) == 0) mode &= ~static_cast<mode_t>(S_IROTH);
  if (mode != (status.st_mode & 07777)) (void)!::fchmod(file, mode);
  return file;
}

FileLock::FileLock(const fs::path& path) {
  struct stat locked {};
  struct stat named {};
  // Whoever held it before may have removed the file in between.
  const auto removed = [&] {
    return ::fstat(file_, &locked) != 0 || ::stat(path.c_str(), &named) != 0 ||
           locked.st_dev != named.st_dev || locked.st_ino != named.st_ino;
  };
  do {
    if (file_ >= 0) ::close(file_);
    file_ = open_lock(path);
    problem_ = file_ >= 0 && ::flock(file_, LOCK_EX | LOCK_NB) == 0 ? 0 : errno;
  } while (problem_ == EINTR || (problem_ == 0 && removed()));
}

FileLock::~FileLock() {
  if (file_ >= 0) ::close(file_);
}

void fsync_directory(const fs::path& directory) {
  const std::string name = directory.empty() ? "." : directory.string();
  const int file = open(name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (file < 0) refuse_file("open", name, errno);
  const int result = fsync(file), code = errno;
  close(file);
  if (result != 0 && code != EINVAL)
    refuse_file("fsync", name, code);  // some file systems have no directory fsync
}

void fsync_all(const fs::path& directory) {
  for (const auto& entry : fs::directory_iterator(directory)) {
    const auto status = entry.symlink_status();
    ISOGRAD_INVARIANT(is_directory(status) || is_regular_file(status), entry.path().string());
    if (is_directory(status)) {
      fsync_all(entry.path());
      continue;
    }
    const int file = open(entry.path().c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    const bool synced = file >= 0 && fsync(file) == 0;
    const int code = errno;
    if (file >= 0) close(file);
    if (!synced) refuse_file("fsync", entry.path(), code);
  }
  fsync_directory(directory);
}

void check_no_input(const std::string& option, const fs::path& output, const std::vector<fs::path>& inputs) {
  if (std::error_code ignored; fs::is_directory(output, ignored))
    refuse(option, output.string() + ", a folder", "the name of a file to write", "Add a file's name to it");
  std::error_code error;
  if (output.empty() || !fs::exists(output, error)) return;
  const std::string kind = output.extension().string();
  for (const fs::path& input : inputs) {
    if (input.empty()) continue;
    const bool within = fs::is_directory(input, error) && (kind == ".json" || kind == ".safetensors") &&
                        fs::equivalent(fs::absolute(output).parent_path(), input, error);
    if (within || fs::equivalent(output, input, error))
      refuse(option, "\"" + output.string() + "\", which this command reads",
             "a file of its own: it would be written over", "Name another file");
  }
}

std::string checksum(const void* data, std::size_t bytes) {
  return fmt::format("{:016x}", XXH3_64bits(data, bytes));
}

std::string checksum_file(const fs::path& path) {
  MappedFile file(path);
  return checksum(file.data(), file.size());
}

MappedFile::MappedFile(const fs::path& path) : path_(path) {
  // Non-blocking: opening a pipe without a writer would wait for ever instead of being refused below.
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) refuse_file("open", path, errno);
  struct stat status {};
  if (fstat(file, &status) != 0 || !S_ISREG(status.st_mode)) {
    close(file);
    const bool folder = S_ISDIR(status.st_mode);
    refuse("open " + path.string(), folder ? "a folder" : "something that is not a regular file",
           "a regular file", folder ? "Name a file in it" : "Check the path");
  }
  size_ = static_cast<std::size_t>(status.st_size);
  void* mapped = size_ > 0 ? mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0) : nullptr;
  const int code = errno;
  close(file);
  if (mapped == MAP_FAILED) refuse_file("map", path, code);
  data_ = static_cast<const std::uint8_t*>(mapped);
}

MappedFile::~MappedFile() {
  if (data_) munmap(const_cast<std::uint8_t*>(data_), size_);
}

void MappedFile::release(std::size_t begin, std::size_t bytes) const {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t first = (begin + page - 1) / page * page, end = (begin + bytes) / page * page;
  if (first < end) madvise(const_cast<std::uint8_t*>(data_) + first, end - first, MADV_DONTNEED);
}

}  // namespace isograd
