// Who the ranks of a group are, how they find one another, and whether they still live.
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

// What a rank tells the others through the store before any memory is shared.
struct MemberInfo {
  std::string host;     // name, for messages
  std::string machine;  // identity of the running kernel and of its process namespace
  std::int32_t pid = 0;
  std::uint64_t started = 0;  // clock ticks since boot: tells a process from a later one with its number
  SegmentId staging;
  SegmentId control;  // rank 0 only
};

// This process, without segments.
MemberInfo describe_self();

// Puts `mine` into the store and waits for everyone's. PeerError names the ranks that do not come in time, or
// repeats the reason for which one gave up; ConfigError when the ranks are on several hosts.
std::vector<MemberInfo> meet(c10d::Store& store, int rank, int size, const MemberInfo& mine,
                             const std::string& group, std::chrono::milliseconds timeout);

// Tells ranks that still wait in meet() that this one fails.
void give_up(c10d::Store& store, int rank, const std::string& reason) noexcept;
// What a rank said with give_up(), or our launcher of one that has failed; empty while none did.
std::string given_up(c10d::Store& store);

// Looks after the processes of the other ranks.
class Watch {
 public:
  Watch() = default;
  // Peers in this very process are left out: they leave with a message or not at all.
  explicit Watch(const std::vector<MemberInfo>& members);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;
  // The ranks whose process has ended. One system call.
  std::vector<int> dead();

 private:
  std::vector<MemberInfo> members_;
  std::vector<pollfd> descriptors_;  // negative: nothing to poll
};

bool is_stopped(const MemberInfo& member);

// "rank 2 (host alpha, pid 4711, stopped)": what the kernel says about it now is added where it tells much.
std::string describe(int rank, const MemberInfo& member);

}  // namespace isograd::shm
