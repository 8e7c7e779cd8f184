#include "comm/shm/segment.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <mutex>

#include "base/refuse.hpp"
#include "isograd/error.hpp"

namespace isograd::shm {
namespace {

constexpr const char* kName = "isograd";                   // of the anonymous file
constexpr const char* kLink = "/memfd:isograd (deleted)";  // its name in /proc
constexpr std::uint64_t kGranule = 64 << 10;               // bytes that reserve() takes at a time
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

std::string gigabytes(std::uint64_t bytes) {
  if (bytes < (10u << 20)) return fmt::format("{} bytes", bytes);
  return fmt::format("{:.2f} GiB ({} bytes)", static_cast<double>(bytes) / (1u << 30), bytes);
}

// Segments mapped in this process, by inode. Rank threads share them.
std::mutex registry_mutex;
std::map<std::uint64_t, std::weak_ptr<Segment>>& registry() {
  static auto* never_destroyed = new std::map<std::uint64_t, std::weak_ptr<Segment>>;
  return *never_destroyed;
}

[[noreturn]] void refuse_memory(const std::string& purpose, const std::string& what, int error,
                                std::uint64_t bytes) {
  isograd::refuse("shared memory for " + purpose, what + ": " + std::strerror(error), gigabytes(bytes),
                  "Free memory (or raise the limit named above), or use smaller buffers");
}

std::byte* map_shared(int descriptor, std::uint64_t bytes, const std::string& purpose) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (data == MAP_FAILED)
    isograd::refuse("shared memory for " + purpose,
                    fmt::format("mapping {} failed: {}", gigabytes(bytes), std::strerror(errno)),
                    "address space for the buffers of all ranks",
                    "Raise the limit on address space (ulimit -v) or use smaller buffers");
  return static_cast<std::byte*>(data);
}

// The only number in a file; the maximum when there is none ("max", no such file).
std::uint64_t number_in(const std::string& path) {
  std::ifstream file(path);
  std::uint64_t value = 0;
  return file >> value ? value : std::numeric_limits<std::uint64_t>::max();
}

// The tightest limit of this process's control groups (version 2), less their usage.
std::uint64_t available_in_control_groups() {
  constexpr std::uint64_t kNone = std::numeric_limits<std::uint64_t>::max();
  std::uint64_t available = kNone;
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const bool second = line.rfind("0::", 0) == 0;
    const auto controllers = line.find(":memory:");
    if (!second && controllers == std::string::npos) continue;
    std::string path = second ? line.substr(3) : line.substr(controllers + 8);
    const std::string root = second ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
    const char* limit_name = second ? "/memory.max" : "/memory.limit_in_bytes";
    const char* used_name = second ? "/memory.current" : "/memory.usage_in_bytes";
    for (;;) {  // from the innermost group outwards
      const std::string folder = root + (path == "/" ? "" : path);
      const std::uint64_t limit = number_in(folder + limit_name), used = number_in(folder + used_name);
      if (limit != kNone && used != kNone) available = std::min(available, limit > used ? limit - used : 0);
      if (path.empty() || path == "/") break;
      path.erase(path.rfind('/'));
    }
  }
  return available;
}

// Rank threads ask at the same moment, each before it takes anything, and reading a dozen files of /proc and
// /sys takes longer than filling small buffers. So they share one answer until one of them takes memory.
constexpr auto kMeasuredFor = std::chrono::milliseconds(2);
struct Measured {
  std::uint64_t available = 0;
  std::chrono::steady_clock::time_point until{};
};
std::mutex measured_mutex;
Measured measured;

void forget_measured() {
  const std::lock_guard lock(measured_mutex);
  measured = {};
}

}  // namespace

std::uint64_t available_memory() {
  const std::lock_guard lock(measured_mutex);
  const auto now = std::chrono::steady_clock::now();
  if (now < measured.until) return measured.available;
  std::uint64_t available = std::numeric_limits<std::uint64_t>::max();
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);)
    if (line.rfind("MemAvailable:", 0) == 0) available = std::stoull(line.substr(13)) * 1024;
  measured = {std::min(available, available_in_control_groups()), now + kMeasuredFor};
  return measured.available;
}

void require_memory(std::uint64_t bytes, std::uint64_t available, const std::string& purpose) {
  if (bytes <= available) return;
  isograd::refuse("shared memory for " + purpose, gigabytes(available) + " available",
                  gigabytes(bytes) + " for all ranks together",
                  "Use fewer ranks or a smaller model, or give the machine more memory");
}

std::shared_ptr<Segment> Segment::create(std::uint64_t bytes, std::uint64_t at_once,
                                         const std::string& purpose) {
  const auto refuse = [&](const std::string& what, int error) { refuse_memory(purpose, what, error, bytes); };
  // Growing a file beyond this limit would raise a signal instead of an error.
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && bytes > limit.rlim_cur)
    refuse(fmt::format("a limit on file sizes (ulimit -f) of {}", gigabytes(limit.rlim_cur)), EFBIG);
  std::shared_ptr<Segment> segment(new Segment);
  segment->descriptor_ = ::memfd_create(kName, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (segment->descriptor_ < 0) refuse("memfd_create failed", errno);
  if (::fchmod(segment->descriptor_, 0600) != 0) refuse("fchmod failed", errno);
  // A signal may undo a call, so each piece must be done before the next tick of a timer.
  constexpr std::uint64_t kPiece = 4 << 20;
  const auto allocate = [&](std::uint64_t begin, std::uint64_t end) {
    for (std::uint64_t done = begin; done < end;) {
      const std::uint64_t piece = std::min(kPiece, end - done);
      const int error =  // returned, not in errno
          ::posix_fallocate(segment->descriptor_, static_cast<off_t>(done), static_cast<off_t>(piece));
      if (error != 0 && error != EINTR) refuse("reserving the pages failed", error);
      if (error == 0) done += piece;
    }
  };
  allocate(0, at_once);
  if (at_once < bytes && ::ftruncate(segment->descriptor_, static_cast<off_t>(bytes)) != 0)
    refuse("ftruncate failed", errno);
  ::fcntl(segment->descriptor_, F_ADD_SEALS, kSeals);
  struct stat status {};
  if (::fstat(segment->descriptor_, &status) != 0) refuse("fstat failed", errno);
  segment->data_ = map_shared(segment->descriptor_, bytes, purpose);
  // Before Linux 5.14 memory cannot be reserved later.
  if (at_once < bytes && ::madvise(segment->data_, 1, MADV_POPULATE_WRITE) != 0) {
    allocate(at_once, bytes);
    at_once = bytes;
  }
  forget_measured();
  segment->bytes_ = bytes;
  segment->purpose_ = purpose;
  segment->reserved_.assign((bytes + kGranule - 1) / kGranule, at_once == bytes);
  segment->id_ = {::getpid(), segment->descriptor_, status.st_ino, bytes};
  const std::lock_guard lock(registry_mutex);
  registry()[segment->id_.inode] = segment;
  return segment;
}

void Segment::reserve(const std::byte* begin, std::uint64_t bytes) {
  if (bytes == 0) return;
  const auto first = static_cast<std::uint64_t>(begin - data_);
  for (std::uint64_t at = first / kGranule; at * kGranule < first + bytes; ++at) {
    if (reserved_[at]) continue;
    std::byte* granule = data_ + at * kGranule;
    while (::madvise(granule, std::min(kGranule, bytes_ - at * kGranule), MADV_POPULATE_WRITE) != 0)
      if (errno != EINTR && errno != EAGAIN)
        refuse_memory(purpose_, "reserving the pages failed", errno, bytes);
    reserved_[at] = true;
    forget_measured();
  }
}

std::shared_ptr<Segment> Segment::open(const SegmentId& id, const std::string& purpose) {
  if (id.pid == ::getpid()) {
    const std::lock_guard lock(registry_mutex);
    if (auto found = registry().find(id.inode); found != registry().end()) {
      if (auto segment = found->second.lock()) return segment;
    }
  }
  const std::string path = fmt::format("/proc/{}/fd/{}", id.pid, id.descriptor);
  const auto refuse = [&](const std::string& what) {
    isograd::refuse("shared memory for " + purpose, path + ": " + what,
                    "the memory of a rank of the same host, user and process namespace",
                    "Start all ranks as one user in one container, with /proc mounted");
  };
  // The file is inspected before it is opened, through one reference, so that a forged entry cannot make this
  // process open a device, a pipe or another user's file.
  const int looked_at = ::open(path.c_str(), O_PATH | O_CLOEXEC);
  if (looked_at < 0) refuse(std::strerror(errno));
  const std::string through = fmt::format("/proc/self/fd/{}", looked_at);
  char name[64] = {};
  struct stat status {};
  std::string trouble;
  if (::fstat(looked_at, &status) != 0 || ::readlink(through.c_str(), name, sizeof(name) - 1) < 0)
    trouble = std::strerror(errno);
  else if (status.st_uid != ::geteuid())
    trouble = fmt::format("the memory of user {}", status.st_uid);
  else if (!S_ISREG(status.st_mode) || std::string(name) != kLink)
    trouble = "no shared memory of isograd";
  else if (status.st_ino != id.inode || static_cast<std::uint64_t>(status.st_size) != id.bytes)
    trouble = "another file than announced";
  std::shared_ptr<Segment> segment(new Segment);
  if (trouble.empty()) segment->descriptor_ = ::open(through.c_str(), O_RDWR | O_CLOEXEC);
  if (trouble.empty() && segment->descriptor_ < 0) trouble = std::strerror(errno);
  ::close(looked_at);
  if (!trouble.empty()) refuse(trouble);
  // An unsealed file could be truncated, which would kill a process that maps it.
  const int seals = ::fcntl(segment->descriptor_, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) refuse("memory that is not sealed");
  segment->data_ = map_shared(segment->descriptor_, id.bytes, purpose);
  segment->bytes_ = id.bytes;
  segment->id_ = id;
  segment->close_descriptor();
  return segment;
}

void Segment::close_descriptor() {
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1;
}

Segment::~Segment() {
  {
    const std::lock_guard lock(registry_mutex);
    auto found = registry().find(id_.inode);
    if (found != registry().end() && found->second.expired()) registry().erase(found);
  }
  if (data_) ::munmap(data_, bytes_);
  close_descriptor();
}

}  // namespace isograd::shm
