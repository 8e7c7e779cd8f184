#include "comm/shm/members.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <cerrno>
#include <sstream>
#include <thread>

#include "base/refuse.hpp"
#include "comm/failures.hpp"
#include "comm/hosts/meeting.hpp"
#include "comm/store.hpp"
#include "isograd/error.hpp"

namespace isograd::shm {
namespace {

constexpr int kVersion = 4;  // of the text below and of the layouts in control.hpp and message.hpp

struct ProcessStatus {
  char state = 0;  // as in ps; 0: no such process; '?': unknown
  std::uint64_t started = 0;
};

ProcessStatus status_of(std::int32_t pid) {
  const int file = ::open(fmt::format("/proc/{}/stat", pid).c_str(), O_RDONLY | O_CLOEXEC);
  // For example out of descriptors. That does not mean that a peer has ended.
  if (file < 0) return {.state = ::kill(pid, 0) == 0 || errno == EPERM ? '?' : '\0'};
  char buffer[1024];
  const ssize_t length = ::read(file, buffer, sizeof(buffer));
  ::close(file);
  if (length <= 0) return {};
  const std::string text(buffer, static_cast<std::size_t>(length));
  // The command's name may contain anything. After its closing parenthesis come the state and numbers.
  std::istringstream fields(text.substr(text.rfind(')') + 1));
  ProcessStatus status;
  std::string skipped;
  fields >> status.state;
  for (int field = 4; field < 22; ++field) fields >> skipped;
  fields >> status.started;
  return status;
}

bool gone(const ProcessStatus& status, const MemberInfo& member) {
  if (status.state == '?') return false;
  return status.state == 0 || status.state == 'Z' || status.state == 'X' || status.started != member.started;
}

std::string write(const MemberInfo& info) {
  std::ostringstream out;
  out << kVersion << '\n'
      << info.host << '\n'
      << info.machine << '\n'
      << info.torch << '\n'
      << info.pid << ' ' << info.started;
  for (const SegmentId* id : {&info.staging, &info.control})
    out << ' ' << id->pid << ' ' << id->descriptor << ' ' << id->inode << ' ' << id->bytes;
  return out.str();
}

MemberInfo read(const std::string& text, int rank, const std::string& group) {
  std::istringstream in(text);
  int version = 0;
  in >> version;
  in.ignore();
  MemberInfo info;
  if (version == kVersion) {
    std::getline(in, info.host);
    std::getline(in, info.machine);
    std::getline(in, info.torch);
    in >> info.pid >> info.started;
    for (SegmentId* id : {&info.staging, &info.control})
      in >> id->pid >> id->descriptor >> id->inode >> id->bytes;
  }
  if (version != kVersion || !in)
    refuse(fmt::format("joining group '{}'", group),
           fmt::format("rank {} uses version {} of the protocol", rank, version),
           fmt::format("version {}", kVersion), "Start all ranks with the same build of isograd");
  return info;
}

std::string member_key(int rank) { return fmt::format("member/{}", rank); }
constexpr const char* kGivenUp = "given-up";

}  // namespace

MemberInfo describe_self() {
  MemberInfo info;
  HostIdentity host = identify_host();
  info.host = std::move(host.name);
  info.machine = std::move(host.machine);
  info.torch = std::move(host.torch);
  info.pid = ::getpid();
  info.started = status_of(info.pid).started;
  return info;
}

std::vector<MemberInfo> meet(c10d::Store& store, int rank, int size, const MemberInfo& mine,
                             const std::string& group, std::chrono::milliseconds timeout) {
  const std::string where = fmt::format("joining group '{}' as rank {} of {}", group, rank, size);
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  std::vector<int> missing;
  std::vector<MemberInfo> members(static_cast<std::size_t>(size));
  try {
    store.set(member_key(rank), write(mine));
    for (int r = 0; r < size; ++r) missing.push_back(r);
    auto nap = std::chrono::microseconds(50);  // rank threads meet within a few of these
    for (;;) {
      std::erase_if(missing, [&](int r) {
        if (!store.check({member_key(r)})) return false;
        members[static_cast<std::size_t>(r)] = read(store.get_to_str(member_key(r)), r, group);
        return true;
      });
      if (missing.empty()) break;
      if (const std::string reason = given_up(store); !reason.empty())
        throw RelayedError({.where = where,
                            .found = reason,
                            .expected = "every rank to join",
                            .action = "Fix what that rank reports, then start all ranks again"});
      if (std::chrono::steady_clock::now() >= deadline) {
        std::string names;
        for (int r : missing) names += fmt::format("{}{}", names.empty() ? "" : ", ", r);
        throw_peer_error(
            where, fmt::format("nothing from rank {} within {} ms", names, timeout.count()),
            "every rank to join",
            "Read the output of the missing ranks. If they were only slow, raise parallel.timeout_seconds "
            "(in C++: JoinOptions::timeout)");
      }
      std::this_thread::sleep_for(nap);
      nap = std::min<std::chrono::microseconds>(nap * 3 / 2, std::chrono::milliseconds(20));
    }
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {  // the store's own exceptions
    throw_peer_error(where, fmt::format("the store failed: {}", error.what()), "a store that all ranks reach",
                     "See whether the launcher or rank 0 still runs, then start all ranks again");
  }
  for (int r = 0; r < size; ++r) {
    const MemberInfo& other = members[static_cast<std::size_t>(r)];
    check_torch(where, r, other.torch, members[0].torch);
    if (other.machine == members[0].machine) continue;
    refuse(where,
           fmt::format("rank 0 on host {} and rank {} on host {}{}", members[0].host, r, other.host,
                       other.host == members[0].host ? " in another container" : ""),
           "all ranks on one host, which the shm backend needs",
           "Start all ranks on one host, or use --backend shm+mpi");
  }
  return members;
}

void give_up(c10d::Store& store, int rank, const std::string& reason) noexcept {
  try {
    if (given_up(store).empty())  // the first reason caused the later ones
      store.set(kGivenUp, fmt::format("rank {} failed: {}", rank, reason));
  } catch (...) {  // the store is lost too: the others detect that themselves
  }
}

std::string given_up(c10d::Store& store) {
  try {
    if (store.check({kGivenUp})) return store.get_to_str(kGivenUp);
    auto* const prefixed = dynamic_cast<c10d::PrefixStore*>(&store);
    const auto all = prefixed ? prefixed->getUnderlyingNonPrefixStore() : nullptr;
    // Only our launcher knows of ranks that ended before they published who they are.
    if (dynamic_cast<LocalStore*>(all.get()) && all->check({kLaunchFailed}))
      return all->get_to_str(kLaunchFailed);
    return {};
  } catch (const std::exception&) {
    return {};  // without its store a rank still has the deadline and the state of its peers
  }
}

Watch::Watch(const std::vector<MemberInfo>& members) : members_(members) {
  for (const MemberInfo& member : members_) {
    int descriptor = -1;
    if (member.pid != ::getpid()) {
      descriptor = static_cast<int>(::syscall(SYS_pidfd_open, member.pid, 0));
      // It has ended, or another process has its number: dead() checks the start time.
      if (descriptor >= 0 && gone(status_of(member.pid), member)) {
        ::close(descriptor);
        descriptor = -1;
      }
    }
    descriptors_.push_back({descriptor, POLLIN, 0});
  }
}

Watch::~Watch() {
  for (const pollfd& entry : descriptors_)
    if (entry.fd >= 0) ::close(entry.fd);
}

std::vector<int> Watch::dead() {
  std::vector<int> ranks;
  for (pollfd& entry : descriptors_) entry.revents = 0;
  ::poll(descriptors_.data(), descriptors_.size(), 0);
  for (std::size_t r = 0; r < descriptors_.size(); ++r) {
    const bool ended = descriptors_[r].fd >= 0
                           ? descriptors_[r].revents != 0
                           : members_[r].pid != ::getpid() && gone(status_of(members_[r].pid), members_[r]);
    if (ended) ranks.push_back(static_cast<int>(r));
  }
  return ranks;
}

bool is_stopped(const MemberInfo& member) {
  if (member.pid == ::getpid()) return false;
  const ProcessStatus status = status_of(member.pid);
  return !gone(status, member) && (status.state == 'T' || status.state == 't');
}

std::string describe(int rank, const MemberInfo& member) {
  if (member.pid == ::getpid()) return fmt::format("rank {} (a thread of this process)", rank);
  const ProcessStatus status = status_of(member.pid);
  const char* note = gone(status, member)                         ? ", ended"
                     : status.state == 'T' || status.state == 't' ? ", stopped"
                                                                  : "";
  return fmt::format("rank {} (host {}, pid {}{})", rank, member.host, member.pid, note);
}

}  // namespace isograd::shm
