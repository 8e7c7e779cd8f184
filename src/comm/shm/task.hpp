// Task: an operation of one rank in a group: its part in a collective (operation.hpp) or a message
// (message.hpp). It is a state machine that polling advances.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/shm/control.hpp"

namespace isograd {

// The place in the source that called the current collective; c10d's options have no field for it.
struct CallSite {
  const char* file = nullptr;  // null: unknown, as in calls through c10d
  unsigned line = 0;
};

namespace detail {
inline thread_local CallSite call_site;
}

inline CallSite current_call_site() { return detail::call_site; }

// Sets the call site of this thread while the object lives.
class CallSiteScope {
 public:
  explicit CallSiteScope(CallSite site) : outer_(detail::call_site) { detail::call_site = site; }
  ~CallSiteScope() { detail::call_site = outer_; }
  CallSiteScope(const CallSiteScope&) = delete;
  CallSiteScope& operator=(const CallSiteScope&) = delete;

 private:
  CallSite outer_;
};

namespace shm {

class Engine;

// Memory of this rank, for or from one rank.
struct Region {
  std::byte* data = nullptr;
  std::uint64_t bytes = 0;
};

// Memory of this rank that a task reads or writes. If one of two tasks writes memory that the other uses, the
// later one starts after the earlier one has ended.
struct Extent {
  const std::byte* begin = nullptr;
  std::uint64_t bytes = 0;
  bool written = true;
  bool conflicts_with(const Extent& other) const {
    return (written || other.written) && bytes > 0 && other.bytes > 0 && begin < other.begin + other.bytes &&
           other.begin < begin + bytes;
  }
};

// The progress of a task. Tests make a rank fail at each phase.
enum class Phase {
  kStart,      // nothing announced yet
  kAnnounced,  // the others can see the call and the first data
  kWorked,     // this rank has read and written everything it must
  kComplete    // so have the others
};

class Task {
 public:
  virtual ~Task() = default;
  bool complete() const { return complete_; }
  std::uint64_t number() const { return number_; }  // of the group's operations or the channel's messages
  const Fingerprint& fingerprint() const { return fingerprint_; }
  virtual std::string name() const = 0;  // "all_reduce #12"
  virtual std::string call() const = 0;  // "all_reduce(sum) of 12 Float at trainer.cpp:7"
  // The ranks that this one waits for; if `any_will_do`, for one of them.
  virtual std::vector<int> awaited() const = 0;
  virtual bool any_will_do() const { return false; }
  virtual int source() const { return -1; }  // of a message that is received

  // The tensors, kept alive until the task is destroyed.
  std::shared_ptr<void> keep_alive;

 protected:
  Task(Fingerprint fingerprint, std::vector<Extent> extents)
      : fingerprint_(fingerprint), extents_(std::move(extents)) {}

  Engine& engine() const { return *engine_; }
  void complete_now();
  virtual bool must_follow(const Task& earlier) const;

  Fingerprint fingerprint_;
  CallSite site_;
  std::uint64_t number_ = 0;
  bool started_ = false;  // announced, posted or matched
  bool complete_ = false;

 private:
  friend class Engine;
  // Called once, in the order of the calls, with the engine's lock held: the task takes its number.
  virtual void enter() = 0;
  // Advances as far as possible. `may_start`: no earlier task blocks it. `staging_free`: no earlier task
  // still needs this rank's staging buffers. Returns whether anything changed.
  virtual bool advance(bool may_start, bool staging_free) = 0;
  virtual bool can_start() { return true; }  // whether slots and envelopes allow a start
  virtual bool holds_staging() const { return false; }
  virtual bool is_message() const { return false; }

  Engine* engine_ = nullptr;
  std::vector<Extent> extents_;
  std::chrono::steady_clock::time_point polled_since_;
};

// The last operations of a rank in a group, for error messages.
class History {
 public:
  static constexpr std::size_t kLength = 64;

  // Cheap: it stores a few words per call.
  void begin(const Fingerprint& fingerprint, const CallSite& site, std::uint64_t number);
  // Oldest first, runs of the same call on one line. Operations in `under_way` are marked as incomplete.
  std::string text(const std::vector<std::shared_ptr<Task>>& under_way) const;

 private:
  struct Entry {
    Fingerprint fingerprint;
    CallSite site;
    std::uint64_t number = 0;
  };
  std::array<Entry, kLength> entries_;
  std::uint64_t count_ = 0;
};

// "all_reduce(sum) of 12 Float"; for a message "send of 12 Float".
std::string call_of(const Fingerprint& fingerprint);
const char* name_of(Kind kind);
std::string at(const SiteText& site);  // " at trainer.cpp:7", empty when unknown
SiteText to_text(const CallSite& site);

}  // namespace shm
}  // namespace isograd
