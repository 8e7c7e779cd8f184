// The members of a group: who they are, how they find each other, and whether they are alive.
#pragma once

#include <poll.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/shm/segment.hpp"

namespace c10d {
class Store;
}

namespace isograd::shm {

// The data that a rank publishes in the store before any memory is shared.
struct MemberInfo {
  std::string host;     // name, for messages
  std::string machine;  // identifies the running kernel and its process namespace
  std::string torch;    // HostIdentity::torch
  std::int32_t pid = 0;
  std::uint64_t started = 0;  // clock ticks since boot, because process numbers are reused
  SegmentId staging;
  SegmentId control;  // rank 0 only
};

// Describes this process, without segments.
MemberInfo describe_self();

// Puts `mine` into the store and waits for all members. PeerError names the ranks that do not come in time,
// or repeats the reason for which one gave up. ConfigError when the ranks are on several hosts or have
// several LibTorches.
std::vector<MemberInfo> meet(c10d::Store& store, int rank, int size, const MemberInfo& mine,
                             const std::string& group, std::chrono::milliseconds timeout);

// Reports to ranks that still wait in meet() that this one fails.
void give_up(c10d::Store& store, int rank, const std::string& reason) noexcept;
// The reason that a rank gave to give_up(), or our launcher's for a failed rank. Empty: none.
std::string given_up(c10d::Store& store);

// Watches the processes of the other ranks.
class Watch {
 public:
  Watch() = default;
  // Peers in this process are left out: they leave with a message or not at all.
  explicit Watch(const std::vector<MemberInfo>& members);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;
  // The ranks whose process has ended. It makes one system call.
  std::vector<int> dead();

 private:
  std::vector<MemberInfo> members_;
  std::vector<pollfd> descriptors_;  // negative: nothing to poll
};

bool is_stopped(const MemberInfo& member);

// "rank 2 (host alpha, pid 4711, stopped)". The process state is added where it explains something.
std::string describe(int rank, const MemberInfo& member);

}  // namespace isograd::shm
