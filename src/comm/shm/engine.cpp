#include "comm/shm/engine.hpp"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/shm/operation.hpp"
#include "isograd/error.hpp"

namespace isograd::shm {
namespace {

using Clock = std::chrono::steady_clock;

// How to wait (2 ranks on 2 cores meet in spinning; more ranks than cores need the yields; after that sleep).
constexpr int kSpins = 10;
constexpr auto kYielding = std::chrono::microseconds(50);
constexpr auto kLookEvery = std::chrono::milliseconds(100);  // at the peers' lives, when only polled
constexpr long kShortNapNanoseconds = 200'000;  // while operations of several groups are under way
constexpr long kNapNanoseconds = 10'000'000;    // between looks at the peers' lives and at the deadline

// The groups in which operations that this thread started may be under way.
thread_local std::vector<std::weak_ptr<Engine>> busy;

// Registered as a sleeper while it lives.
struct Listener {
  explicit Listener(Bell& which) : bell(which), seen(bell.listen()) {}
  ~Listener() { bell.leave(); }
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;
  Bell& bell;
  const std::uint32_t seen;
};

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

constexpr const char* kRestart = "Look at that rank's output for the reason, then restart all ranks";

}  // namespace

Engine::Engine(c10d::Store& store, int rank, int size, std::string name, std::chrono::milliseconds timeout,
               EngineOptions options)
    : rank_(rank), size_(size), name_(std::move(name)), options_(options) {
  ISOGRAD_INVARIANT(rank_ >= 0 && rank_ < size_, fmt::format("rank {} of {}", rank_, size_));
  ISOGRAD_INVARIANT(options_.chunks >= 1 && options_.chunk_bytes % 64 == 0 &&
                        options_.chunk_bytes >= 8 * static_cast<std::uint64_t>(size_),
                    fmt::format("{} chunks of {} bytes", options_.chunks, options_.chunk_bytes));
  try {
    MemberInfo mine = describe_self();
    const std::uint64_t staging_bytes = options_.chunks * options_.chunk_bytes;
    const std::string staging_purpose = fmt::format("the staging buffers of group '{}'", name_);
    const std::string control_purpose = fmt::format("the control block of group '{}'", name_);
    require_memory(staging_bytes * static_cast<std::uint64_t>(size_), available_memory(), staging_purpose);
    auto staging = Segment::create(staging_bytes, staging_purpose);
    mine.staging = staging->id();
    if (rank_ == 0) {
      control_segment_ = Segment::create(Control::bytes(size_), control_purpose);
      auto* control = new (control_segment_->data()) Control{};  // the pages are zero: so are all atomics
      control->magic = Control::kMagic;
      control->size = size_;
      mine.control = control_segment_->id();
    }
    members_ = meet(store, rank_, size_, mine, name_, timeout);
    watch_ = std::make_unique<Watch>(members_);
    control_segment_ = Segment::open(members_[0].control, control_purpose);
    control_ = reinterpret_cast<Control*>(control_segment_->data());
    ISOGRAD_INVARIANT(control_->magic == Control::kMagic && control_->size == size_,
                      fmt::format("magic {:x}, size {}", control_->magic, control_->size));
    for (int r = 0; r < size_; ++r) {
      const SegmentId& id = members_[static_cast<std::size_t>(r)].staging;
      staging_.push_back(r == rank_ ? staging : Segment::open(id, staging_purpose));
    }
    arrive(store, timeout);
    staging->close_descriptor();
    if (rank_ == 0) control_segment_->close_descriptor();
  } catch (const std::exception& error) {
    give_up(store, rank_, error.what());
    if (control_) poison(error.what());
    throw;
  }
}

Engine::~Engine() {
  control_->member(rank_).left.store(1, std::memory_order_seq_cst);
  control_->bell.ring();
}

// Nobody closes the descriptors through which others find a segment before everyone has found it.
void Engine::arrive(c10d::Store& store, std::chrono::milliseconds timeout) {
  control_->member(rank_).arrived.store(1, std::memory_order_seq_cst);
  const auto deadline = Clock::now() + timeout;
  auto nap = std::chrono::microseconds(20);
  for (;;) {
    const auto dead = watch_->dead();
    std::string missing;
    bool lost = false;
    for (int r = 0; r < size_; ++r) {
      if (control_->member(r).arrived.load(std::memory_order_acquire)) continue;
      lost |= std::find(dead.begin(), dead.end(), r) != dead.end();
      missing += (missing.empty() ? "" : ", ") + describe(r, members_[static_cast<std::size_t>(r)]);
    }
    if (missing.empty()) return;
    std::string found;
    if (lost) found = missing + " ended before it had joined";
    if (Clock::now() >= deadline)
      found = missing + fmt::format(" did not join within {} ms", timeout.count());
    if (const auto reason = given_up(store); !reason.empty()) found = reason;
    if (!found.empty()) {
      throw PeerError({.where = fmt::format("joining group '{}' as rank {} of {}", name_, rank_, size_),
                       .found = found,
                       .expected = "every rank to join",
                       .action = kRestart});
    }
    std::this_thread::sleep_for(nap);
    nap = std::min<std::chrono::microseconds>(nap * 2, std::chrono::milliseconds(5));
  }
}

void Engine::start(const std::shared_ptr<Operation>& operation) {
  {
    const std::lock_guard lock(mutex_);
    operation->engine_ = this;
    operation->sequence_ = next_sequence_++;
    operation->is_local_source_ = operation->is_source(rank_);
    if (operation->is_local_source_) {
      operation->local_ = locate(operation->source_data(), operation->source_bytes());
    }
    under_way_.push_back(operation);
  }
  if (progress(*operation)) return;
  const auto same = [this](const std::weak_ptr<Engine>& entry) { return entry.lock().get() == this; };
  if (std::none_of(busy.begin(), busy.end(), same)) busy.push_back(weak_from_this());
}

bool Engine::slot_is_free(std::uint64_t sequence) {
  if (sequence < kSlots) return true;
  const std::uint64_t before = sequence - kSlots;
  std::uint64_t& free_of = free_of_[sequence % kSlots];
  if (free_of == before + 1) return true;
  for (int r = 0; r < size_; ++r) {
    if (step_of(control_->slot(r, before).done.load(std::memory_order_acquire), before) != kEverything)
      return false;
  }
  free_of = before + 1;
  return true;
}

bool Engine::advance_all() {
  bool moved = false, staging_free = true;
  for (std::size_t i = 0; i < under_way_.size(); ++i) {
    Operation& operation = *under_way_[i];
    bool may_announce = operation.announced_;
    if (!may_announce) {
      may_announce = slot_is_free(operation.sequence_);
      for (std::size_t j = 0; j < i && may_announce; ++j) {
        may_announce = under_way_[j]->complete_ || !operation.shares_memory_with(*under_way_[j]);
      }
    }
    moved |= operation.advance(may_announce, staging_free);
    staging_free &= !operation.holds_staging();
    if (operation.all_done_) free_of_[operation.sequence_ % kSlots] = operation.sequence_ + 1;
  }
  std::erase_if(under_way_, [](const auto& operation) { return operation->complete_; });
  return moved;
}

Engine::Moved Engine::step(Operation& operation) {
  const std::lock_guard lock(mutex_);
  if (operation.complete_) return Moved::kComplete;
  const bool moved = advance_all();
  if (operation.complete_) return Moved::kComplete;
  if (poisoned()) {
    advance_all();  // what was published before the poison still counts
    if (operation.complete_) return Moved::kComplete;
    throw_poison(operation);
  }
  return moved ? Moved::kSomething : Moved::kNothing;
}

bool Engine::operation_is_complete(const Operation& operation) {
  const std::lock_guard lock(mutex_);
  return operation.complete_;
}

bool Engine::progress(Operation& operation) {
  const Moved moved = step(operation);
  if (moved != Moved::kNothing) return moved == Moved::kComplete;
  // A caller may poll for ever: look after the peers here too.
  const std::int64_t now = Clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  if (now - last_look_.load(std::memory_order_relaxed) > kLookEvery / std::chrono::nanoseconds(1)) {
    last_look_.store(now, std::memory_order_relaxed);
    throw_if_lost(operation);
  }
  return operation_is_complete(operation);
}

// A peer may wait in another group for what this rank has under way there.
bool Engine::step_others() {
  bool moved = false;
  std::erase_if(busy, [&](const std::weak_ptr<Engine>& entry) {
    const std::shared_ptr<Engine> other = entry.lock();
    if (!other) return true;
    if (other.get() == this) return false;
    const std::unique_lock lock(other->mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return false;
    try {
      moved |= other->advance_all();
    } catch (const Error&) {  // that group is poisoned now: whoever waits in it hears of it
    }
    return other->under_way_.empty();
  });
  return moved;
}

void Engine::wait(Operation& operation, std::chrono::milliseconds timeout) {
  if (step(operation) == Moved::kComplete) return;
  const auto begin = Clock::now();
  auto last_moved = begin;
  int spins = 0;
  for (;;) {
    Moved moved = step(operation);
    if (moved == Moved::kComplete) return;
    if (step_others() || moved == Moved::kSomething) {
      spins = 0;
      last_moved = Clock::now();
      continue;
    }
    if (++spins <= kSpins) {
      pause_briefly();
      continue;
    }
    if (Clock::now() - last_moved < kYielding) {
      ::sched_yield();
      continue;
    }
    {
      const Listener listener(control_->bell);
      moved = step(operation);
      // Other groups have bells of their own.
      if (moved == Moved::kNothing) {
        control_->bell.sleep(listener.seen, busy.size() > 1 ? kShortNapNanoseconds : kNapNanoseconds);
      }
    }
    if (moved == Moved::kComplete) return;
    throw_if_lost(operation);
    if (operation_is_complete(operation)) return;
    if (Clock::now() - begin >= timeout) {
      std::string names;
      for (int r : awaited(operation)) {
        names += (names.empty() ? "" : ", ") + describe(r, members_[static_cast<std::size_t>(r)]);
      }
      fail(operation, fmt::format("{} did not arrive within {} ms", names, timeout.count()),
           "Look at what kept those ranks, or raise the timeout; then restart all ranks");
    }
  }
}

std::vector<int> Engine::awaited(const Operation& operation) {
  const std::lock_guard lock(mutex_);
  std::vector<int> ranks;
  for (const auto& other : under_way_) {  // an earlier one may be what holds `operation` back
    if (other->sequence() > operation.sequence()) break;
    for (int r : other->awaited()) {
      if (std::find(ranks.begin(), ranks.end(), r) == ranks.end()) ranks.push_back(r);
    }
  }
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

// A rank that ends after it has done its part harms nobody: so look at the deaths first, then at the parts.
void Engine::throw_if_lost(Operation& operation) {
  std::vector<int> lost = watch_->dead();
  const auto dead = lost.size();
  for (int r = 0; r < size_; ++r) {
    if (r != rank_ && control_->member(r).left.load(std::memory_order_acquire)) lost.push_back(r);
  }
  if (lost.empty() || step(operation) == Moved::kComplete) return;
  for (int r : awaited(operation)) {
    const auto found = std::find(lost.begin(), lost.end(), r);
    if (found == lost.end()) continue;
    const bool died = static_cast<std::size_t>(found - lost.begin()) < dead;
    const MemberInfo& member = members_[static_cast<std::size_t>(r)];
    const std::string who = member.pid == members_[static_cast<std::size_t>(rank_)].pid
                                ? fmt::format("rank {} (a thread of this process)", r)
                                : fmt::format("rank {} (host {}, pid {})", r, member.host, member.pid);
    fail(operation, fmt::format("{} {}", who, died ? "has ended" : "left the group"), kRestart);
  }
}

std::string Engine::where(const Operation& operation) const {
  return fmt::format("{} of group '{}' on rank {} of {}", operation.name(), name_, rank_, size_);
}

bool Engine::poisoned() const {
  return control_->poison.state.load(std::memory_order_acquire) == Poison::kWritten;
}

void Engine::throw_poison(const Operation& operation) {
  const Poison& poison = control_->poison;
  throw PeerError({.where = where(operation),
                   .found = fmt::format("rank {} failed: {}", poison.rank, poison.text),
                   .expected = "every rank to take part",
                   .action = "Mend what that rank reports, then restart all ranks"});
}

void Engine::fail(const Operation& operation, const std::string& found, const std::string& action) {
  poison(fmt::format("{}: {}", operation.name(), found));
  throw PeerError(
      {.where = where(operation), .found = found, .expected = "every rank to take part", .action = action});
}

void Engine::poison(const std::string& reason) noexcept {
  Poison& poison = control_->poison;
  std::uint32_t clean = Poison::kClean;
  if (!poison.state.compare_exchange_strong(clean, Poison::kBeingWritten, std::memory_order_acq_rel)) return;
  poison.rank = rank_;
  const std::size_t length = std::min(reason.size(), sizeof(poison.text) - 1);
  std::memcpy(poison.text, reason.data(), length);
  poison.text[length] = 0;
  poison.state.store(Poison::kWritten, std::memory_order_seq_cst);
  control_->bell.ring();
}

}  // namespace isograd::shm
