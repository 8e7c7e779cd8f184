// Engine: runs the operations of one rank of one group over shared memory. It handles raw memory, not
// tensors.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/shm/control.hpp"
#include "comm/shm/members.hpp"
#include "comm/shm/message.hpp"
#include "comm/shm/segment.hpp"

namespace c10d {
class Store;
}

namespace isograd::shm {

struct EngineOptions {
  // Speed options. Tests make them small so that a few elements take the many-chunk paths.
  std::uint64_t chunk_bytes = 512 << 10;  // of staging, a multiple of 64
  std::uint64_t chunks = 4;               // staging buffers of a rank, used in turn
  std::uint64_t ring_bytes = 0;  // of a channel between two ranks, a multiple of 64; 0: by group size
  // Called at each phase of each task of this rank. Tests let the rank fail there.
  std::function<void(Phase, const Task&)> observer = {};
  // Report the last operations when one fails: in the OperationsFile, else on standard error unless a rank is
  // lost.
  bool print_history = true;
};

// One call of allocate() on all ranks: a segment of each rank, or one for all.
class Allocation {
 public:
  // `bytes`: size of this rank's segment. `first_bytes`: size of rank 0's.
  Allocation(std::int64_t id, int rank, std::uint64_t bytes, std::uint64_t first_bytes,
             std::vector<std::shared_ptr<Segment>> segments);
  std::int64_t id() const { return id_; }
  std::uint64_t bytes() const { return bytes_; }
  std::byte* data(int rank) const { return segments_[static_cast<std::size_t>(rank)]->data(); }
  std::byte* own() const { return data(rank_); }
  bool holds(const void* begin, std::uint64_t bytes) const;
  // Called when this rank's tensor is destroyed. The memory stays mapped until every rank has released it,
  // because a peer may still name it in an operation.
  void release();
  bool released_by_all() const;

  static std::uint64_t segment_bytes(std::uint64_t bytes);

 private:
  std::atomic<std::uint32_t>& releases() const;
  std::int64_t id_;
  int rank_;
  std::int32_t process_;
  std::uint64_t bytes_, first_bytes_;
  std::vector<std::shared_ptr<Segment>> segments_;
};

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  // Collective. `store` must belong to this group alone. Errors as of meet().
  Engine(c10d::Store& store, int rank, int size, std::string name, std::chrono::milliseconds timeout,
         EngineOptions options = {});
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& name() const { return name_; }
  const EngineOptions& options() const { return options_; }

  // Accepts `task` and does as much as is possible at once.
  void start(const std::shared_ptr<Task>& task);
  // Advances all tasks without waiting. Returns true once `task` is complete. Throws PeerError when the group
  // has failed, or `timeout` after the first call for `task`.
  bool progress(Task& task, std::chrono::milliseconds timeout);
  // Waits until `task` is complete and advances this thread's other groups meanwhile. On timeout it poisons
  // the group and throws a PeerError that names the late ranks.
  void wait(Task& task, std::chrono::milliseconds timeout);
  // Sleeps until something may have changed, at most `longest`.
  void nap(std::chrono::microseconds longest);

  // Collective: zero-filled memory of each rank, or of rank 0 alone, mapped by all. ConfigError on all ranks
  // when it does not fit.
  enum class Copies { kPerRank, kOne };
  std::shared_ptr<Allocation> allocate(std::uint64_t bytes, Copies copies, std::int8_t dtype,
                                       std::int64_t count, std::chrono::milliseconds timeout);

  // The number of collectives begun.
  std::uint64_t sequence();
  // The last operations of this rank, one per line, oldest first.
  std::string history();

  // Every rank reports the first reason. Safe at any time, from any thread.
  void poison(const std::string& reason) noexcept;

  // ---- for tasks; all with the lock held ----
  std::uint64_t take_sequence() { return next_sequence_++; }
  std::uint64_t take_message_number(int to) { return sent_[static_cast<std::size_t>(to)]++; }
  Inbox& inbox(int from) { return inboxes_[static_cast<std::size_t>(from)]; }
  Channel& channel(int from, int to) const;
  std::byte* message_ring(int from, int to) const;  // of the channel between them
  std::uint64_t ring_bytes() const { return ring_bytes_; }
  Location locate(const void* begin, std::uint64_t bytes) const;
  bool slot_is_free(std::uint64_t sequence);
  const std::vector<std::shared_ptr<Task>>& under_way() const { return under_way_; }
  void slot_left_by_all(std::uint64_t sequence) { free_of_[sequence % kSlots] = sequence + 1; }
  void observe(Phase phase, const Task& task) {
    if (options_.observer) options_.observer(phase, task);
  }
  OperationSlot& slot(int rank, std::uint64_t sequence) const { return control_->slot(rank, sequence); }
  Span* spans(int rank, std::uint64_t sequence) const { return control_->spans(rank, sequence); }
  std::byte* staging(int rank, std::uint64_t chunk) const {
    return staging_[static_cast<std::size_t>(rank)]->data() + channels_bytes() +
           (chunk % options_.chunks) * options_.chunk_bytes;
  }
  // As staging(), for this rank, with `bytes` of it reserved.
  std::byte* own_staging(std::uint64_t chunk, std::uint64_t bytes) {
    std::byte* data = staging(rank_, chunk);
    reserve(data, bytes);
    return data;
  }
  // Reserves memory of this rank's segment, before this rank or a peer writes there.
  void reserve(const std::byte* begin, std::uint64_t bytes) {
    staging_[static_cast<std::size_t>(rank_)]->reserve(begin, bytes);
  }
  std::byte* shared_data(int rank, const Location& location) const;
  void ring() { control_->bell.ring(); }
  // Poisons the group with `found` and throws it as a PeerError. `in_order`: a rank left in order.
  [[noreturn]] void fail(const Task& task, const std::string& found, const std::string& action,
                         bool in_order = false);

 private:
  enum class Moved { kNothing, kSomething, kComplete };
  Moved step(Task& task);
  bool step_others();
  bool task_is_complete(const Task& task);
  bool advance_all();  // needs mutex_
  std::vector<int> awaited(const Task& task);
  bool poisoned() const;
  [[noreturn]] void throw_poison(const Task& task);
  std::vector<const Task*> holding_up(const Task& task) const;  // needs mutex_
  void look_after_peers(Task& task, std::chrono::steady_clock::time_point since,
                        std::chrono::milliseconds timeout);
  void throw_if_lost(Task& task);
  void warn_of_stopped(const Task& task);
  [[noreturn]] void time_out(const Task& task, std::chrono::milliseconds timeout);
  // As poison(). Returns whether this was the first reason.
  bool spoil(const std::string& reason, bool of_operation) noexcept;
  void print_history(const std::string& where, bool in_order) noexcept;
  std::string who(int rank) const;
  void arrive(c10d::Store& store, std::chrono::milliseconds timeout);
  std::shared_ptr<Segment> open(c10d::Store& store, int owner, const SegmentId& id,
                                const std::string& purpose);
  void throw_if_given_up(c10d::Store& store) const;
  [[noreturn]] void throw_not_joined(const std::string& found) const;
  bool inherited() const;  // by a forked child, which is no rank
  void throw_if_inherited() const;
  void sweep();
  void remember(const std::shared_ptr<Allocation>& allocation);
  void forget(const Allocation& allocation);
  // A rank's segment: its channels to each rank, its staging buffers, the channels' rings.
  std::uint64_t channels_bytes() const { return static_cast<std::uint64_t>(size_) * sizeof(Channel); }
  std::uint64_t rings_begin() const { return channels_bytes() + options_.chunks * options_.chunk_bytes; }
  std::vector<Payload> exchange(const Fingerprint& print, const Payload& mine,
                                std::chrono::milliseconds timeout);
  std::string where(const Task& task) const;

  const int rank_;
  const int size_;
  const std::string name_;
  const EngineOptions options_;
  const std::uint64_t ring_bytes_;
  std::vector<MemberInfo> members_;
  std::unique_ptr<Watch> watch_;
  std::shared_ptr<Segment> control_segment_;
  Control* control_ = nullptr;
  std::vector<std::shared_ptr<Segment>> staging_;

  const unsigned forks_;  // forks that had led to this rank's process
  // Recursive, because a task that fails while it advances prints the history.
  std::recursive_mutex mutex_;                       // autograd may call from several threads of one rank
  std::chrono::steady_clock::time_point last_look_;  // when progress() last checked the peers' processes
  std::uint64_t next_sequence_ = 0;
  std::vector<std::shared_ptr<Task>> under_way_;  // in the order of the calls
  std::vector<std::uint64_t> sent_;               // messages to each rank
  std::vector<Inbox> inboxes_;                    // of each rank
  History history_;
  std::vector<bool> warned_of_;         // ranks that were reported as stopped
  std::uint64_t free_of_[kSlots] = {};  // sequence + 1 of the operation whose slot all ranks have left
  std::map<std::int64_t, std::shared_ptr<Allocation>> allocations_;
  std::map<const std::byte*, Allocation*> places_;  // the same, by the start of this rank's memory
};

}  // namespace isograd::shm
