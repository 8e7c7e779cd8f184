// Task: what one rank has under way in a group: its part in a collective (operation.hpp) or a message
// (message.hpp). A state machine that is moved on by polling.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/call_site.hpp"
#include "comm/shm/control.hpp"

namespace isograd::shm {

class Engine;

// Memory of this rank that a task reads or writes. Of two tasks of which one writes what the other uses, the
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

// How far a task is. Tests make a rank fail at each.
enum class Phase {
  kStart,      // nothing said yet
  kAnnounced,  // the others can see what is called, and the first data
  kWorked,     // this rank has read and written all that it had to
  kComplete    // so have the others
};

class Task {
 public:
  virtual ~Task() = default;
  bool complete() const { return complete_; }
  std::uint64_t number() const { return number_; }  // sequence number; of a message: within its channel
  const Fingerprint& fingerprint() const { return fingerprint_; }
  virtual std::string name() const = 0;  // "all_reduce #12"
  virtual std::string call() const = 0;  // "all_reduce(sum) of 12 Float at trainer.cpp:7"
  // The ranks this one waits for; if `any_will_do`, for one of them.
  virtual std::vector<int> awaited() const = 0;
  virtual bool any_will_do() const { return false; }

  // Kept alive until the task is destroyed: the tensors.
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
  // Told once, in the order of the calls, with the engine's lock held: time to take a number.
  virtual void enter() = 0;
  // Moves on as far as possible. `may_start`: no earlier task stands in the way. `staging_free`: no earlier
  // one still needs this rank's staging buffers. Returns whether anything moved.
  virtual bool advance(bool may_start, bool staging_free) = 0;
  virtual bool can_start() { return true; }  // as far as slots and envelopes go
  virtual bool holds_staging() const { return false; }
  virtual bool is_message() const { return false; }

  Engine* engine_ = nullptr;
  std::vector<Extent> extents_;
  std::chrono::steady_clock::time_point polled_since_;
};

// "all_reduce(sum) of 12 Float"; of a message: "send of 12 Float".
std::string call_of(const Fingerprint& fingerprint);
const char* name_of(Kind kind);
std::string at(const SiteText& site);  // " at trainer.cpp:7", empty when unknown
SiteText to_text(const CallSite& site);

}  // namespace isograd::shm
