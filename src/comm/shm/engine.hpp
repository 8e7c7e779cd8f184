// Engine: carries out the operations of one rank of one group over shared memory. No tensors here: raw
// memory.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/shm/control.hpp"
#include "comm/shm/members.hpp"
#include "comm/shm/segment.hpp"

namespace c10d {
class Store;
}

namespace isograd::shm {

class Operation;

struct EngineOptions {
  // Speed. Tests shrink them so that a few elements reach the many-chunk paths.
  std::uint64_t chunk_bytes = 512 << 10;  // of staging, a multiple of 64
  std::uint64_t chunks = 4;               // staging buffers of a rank, used in turn
};

// One call of allocate() on all ranks: a segment of each.
class Allocation {
 public:
  Allocation(std::int64_t id, int rank, std::uint64_t bytes, std::vector<std::shared_ptr<Segment>> segments);
  std::int64_t id() const { return id_; }
  std::uint64_t bytes() const { return bytes_; }
  std::byte* data(int rank) const { return segments_[static_cast<std::size_t>(rank)]->data(); }
  std::byte* own() const { return data(rank_); }
  bool holds(const void* begin, std::uint64_t bytes) const;
  // This rank's tensor is gone. The memory stays mapped until every rank says so, because a peer may still
  // name it in an operation.
  void release();
  bool released_by_all() const;

  static std::uint64_t segment_bytes(std::uint64_t bytes);

 private:
  std::atomic<std::uint32_t>& releases() const;
  std::int64_t id_;
  int rank_;
  std::uint64_t bytes_;
  std::vector<std::shared_ptr<Segment>> segments_;
};

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  // Collective. `store` is this group's alone. See meet() for errors.
  Engine(c10d::Store& store, int rank, int size, std::string name, std::chrono::milliseconds timeout,
         EngineOptions options = {});
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& name() const { return name_; }
  const EngineOptions& options() const { return options_; }

  // Gives `operation` the next sequence number and does what can be done at once.
  void start(const std::shared_ptr<Operation>& operation);
  // Does what can be done now, for all operations under way. True once `operation` is complete. Throws
  // PeerError when the group has failed.
  bool progress(Operation& operation);
  // Until `operation` is complete; moves the other groups of this thread meanwhile. Throws PeerError naming
  // who keeps it, and poisons the group.
  void wait(Operation& operation, std::chrono::milliseconds timeout);

  // Collective: zero-filled memory of each rank, mapped by all. ConfigError on all ranks when it does not
  // fit.
  std::shared_ptr<Allocation> allocate(std::uint64_t bytes, std::int8_t dtype, std::int64_t count,
                                       std::chrono::milliseconds timeout);

  // The first reason given is what every rank reports. Safe at any time, from any thread.
  void poison(const std::string& reason) noexcept;

  // For operations.
  Slot& slot(int rank, std::uint64_t sequence) const { return control_->slot(rank, sequence); }
  std::byte* staging(int rank, std::uint64_t chunk) const {
    return staging_[static_cast<std::size_t>(rank)]->data() +
           (chunk % options_.chunks) * options_.chunk_bytes;
  }
  std::byte* shared_data(int rank, const Location& location) const;
  void ring() { control_->bell.ring(); }
  // Poisons the group with `found` and throws it as a PeerError.
  [[noreturn]] void fail(const Operation& operation, const std::string& found, const std::string& action);

 private:
  enum class Moved { kNothing, kSomething, kComplete };
  Moved step(Operation& operation);
  bool step_others();
  bool operation_is_complete(const Operation& operation);
  bool advance_all();                                             // needs mutex_
  bool slot_is_free(std::uint64_t sequence);                      // needs mutex_
  Location locate(const void* begin, std::uint64_t bytes) const;  // needs mutex_
  std::vector<int> awaited(const Operation& operation);
  bool poisoned() const;
  [[noreturn]] void throw_poison(const Operation& operation);
  void throw_if_lost(Operation& operation);
  void arrive(c10d::Store& store, std::chrono::milliseconds timeout);
  void sweep();
  std::vector<Payload> exchange(std::uint8_t stage, std::int8_t dtype, std::int64_t count,
                                const Payload& mine, std::chrono::milliseconds timeout);
  std::string where(const Operation& operation) const;

  const int rank_;
  const int size_;
  const std::string name_;
  const EngineOptions options_;
  std::vector<MemberInfo> members_;
  std::unique_ptr<Watch> watch_;
  std::shared_ptr<Segment> control_segment_;
  Control* control_ = nullptr;
  std::vector<std::shared_ptr<Segment>> staging_;

  std::atomic<std::int64_t> last_look_{0};  // at the peers' lives, by progress()
  std::mutex mutex_;                        // autograd may call from several threads of one rank
  std::uint64_t next_sequence_ = 0;
  std::vector<std::shared_ptr<Operation>> under_way_;  // by sequence
  std::uint64_t free_of_[kSlots] = {};  // sequence + 1 of the operation whose slot everyone has left
  std::map<std::int64_t, std::shared_ptr<Allocation>> allocations_;
};

}  // namespace isograd::shm
