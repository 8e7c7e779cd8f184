// The state folder's lock and version, and folders that are whole or absent.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <utility>

#include "base/number_ranges.hpp"
#include "base/paths.hpp"
#include "base/print.hpp"
#include "base/refuse.hpp"
#include "serve/store/store.hpp"

namespace isograd::serve {
namespace {

constexpr int kVersion = 1;  // of everything below the state folder
constexpr std::size_t kDoingBytes = 256;

void check_version(const fs::path& file) {
  std::error_code error;
  if (!fs::exists(fs::symlink_status(file, error))) return write_file(file, fmt::format("{}\n", kVersion));
  const std::string text = read_file(file, 64);
  const std::int64_t version =
      text.ends_with('\n') ? whole_number(std::string_view(text).substr(0, text.size() - 1)).value_or(0) : 0;
  if (version < 1)
    refuse(file.string(), "\"" + printable(text) + "\"", "the number of a version",
           "Restore the folder from a copy, or name another folder");
  if (version > kVersion)
    refuse(file.string(), fmt::format("version {}", version),
           fmt::format("at most {}, which this isograd knows", kVersion),
           "Start the isograd that wrote the folder, or name another folder");
}

// The file's bytes in memory, shared with it.
char* map_doing(const fs::path& path) {
  std::error_code error;
  if (fs::file_size(path, error) != kDoingBytes || error) write_file(path, std::string(kDoingBytes, '\0'));
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  void* const bytes =
      file < 0 ? MAP_FAILED : ::mmap(nullptr, kDoingBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  const int code = errno;
  if (file >= 0) ::close(file);
  if (bytes == MAP_FAILED) refuse_file("map", path, code);
  return static_cast<char*>(bytes);
}

}  // namespace

StateFolder::StateFolder(fs::path path) : path_(std::move(path)) {
  make_folders(path_);
  const FileLock& lock = lock_.emplace(path_ / "LOCK");
  if (lock.file() < 0) refuse_file("create", path_ / "LOCK", lock.problem());
  if (lock.problem() != 0)
    refuse(path_.string(), "another server that uses this state folder", "a folder of this server alone",
           "Stop the other server, or name another folder");
  check_version(path_ / "VERSION");
  WholeFolder::remove_partial(path_);
  doing_ = map_doing(path_ / "DOING");
}

StateFolder::~StateFolder() { ::munmap(doing_, kDoingBytes); }

std::string StateFolder::set_doing(std::string_view name) {
  std::string former(doing_ + 1, static_cast<unsigned char>(*doing_));
  // The length comes last: a kill in between leaves no half of a name.
  const std::atomic_ref<char> length(*doing_);
  length.store(0);
  name = name.substr(0, kDoingBytes - 1);
  name.copy(doing_ + 1, name.size());
  length.store(static_cast<char>(name.size()));
  return former;
}

WholeFolder::WholeFolder(fs::path target) : target_(std::move(target)) {
  static std::atomic<unsigned> serial{0};
  partial_ = target_.parent_path() / fmt::format(".partial-{}-{}", ::getpid(), serial++);
  std::error_code error;
  if (!fs::create_directory(partial_, error)) refuse_file("create", partial_, error ? error.value() : EEXIST);
}

WholeFolder::~WholeFolder() {
  std::error_code error;
  if (!committed_) fs::remove_all(partial_, error);
}

void WholeFolder::commit() {
  fsync_all(partial_);
  const auto rename_to_target = [&](unsigned flags) {
    return ::renameat2(AT_FDCWD, partial_.c_str(), AT_FDCWD, target_.c_str(), flags) == 0;
  };
  // An exchange leaves no moment without a target; afterwards the former one has the hidden name.
  std::error_code error;
  const bool replaces = fs::exists(fs::symlink_status(target_, error));
  if (!rename_to_target(replaces ? RENAME_EXCHANGE : 0)) refuse_file("rename", target_, errno);
  committed_ = true;
  fsync_directory(target_.parent_path());
  if (replaces) fs::remove_all(partial_, error);
}

void WholeFolder::remove_partial(const fs::path& folder) {
  std::vector<fs::path> left;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with('.') && name.find(".partial-") != name.npos) left.push_back(entry.path());
  }
  for (const fs::path& path : left) fs::remove_all(path);
}

}  // namespace isograd::serve
