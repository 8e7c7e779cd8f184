#include "comm/shm/engine.hpp"

#include <fmt/format.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <new>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/refuse.hpp"
#include "comm/failures.hpp"
#include "comm/shm/operation.hpp"
#include "isograd/error.hpp"

namespace isograd::shm {
namespace {

using Clock = std::chrono::steady_clock;

// How to wait: 2 ranks on 2 cores meet while spinning; more ranks than cores need the yields; then sleep.
constexpr int kSpins = 10;
constexpr auto kYielding = std::chrono::microseconds(50);
constexpr auto kLookEvery = std::chrono::milliseconds(100);  // at the peers' processes
constexpr long kShortNapNanoseconds = 200'000;  // while operations of several groups are under way
constexpr long kNapNanoseconds = 10'000'000;    // otherwise

// The groups in which operations that this thread started may be under way.
thread_local std::vector<std::weak_ptr<Engine>> busy;

// The number of forks that have led to this process.
std::atomic<unsigned> forks{0};
unsigned count_forks() {
  static const int registered = ::pthread_atfork(nullptr, nullptr, [] { ++forks; });
  ISOGRAD_INVARIANT(registered == 0, "pthread_atfork failed");
  return forks.load(std::memory_order_relaxed);
}

// A timeout of "for ever" would overflow when it is added to a time.
std::chrono::milliseconds bounded(std::chrono::milliseconds timeout) {
  return std::min<std::chrono::milliseconds>(timeout, std::chrono::hours(24 * 365 * 10));
}

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

// As much for a rank's messages as for its collectives, with a minimum for each peer.
std::uint64_t ring_bytes_for(int size) {
  constexpr std::uint64_t kAll = 4 << 20, kLeast = 16 << 10, kMost = 256 << 10;
  return std::clamp(kAll / static_cast<std::uint64_t>(size) / 64 * 64, kLeast, kMost);
}

}  // namespace

void Bell::ring() {
  if (sleepers.load(std::memory_order_seq_cst) == 0) return;
  count.fetch_add(1, std::memory_order_seq_cst);
  ::syscall(SYS_futex, &count, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

std::uint32_t Bell::listen() {
  sleepers.fetch_add(1, std::memory_order_seq_cst);
#if !defined(ISOGRAD_SANITIZE_THREAD)  // it does not support fences; a missed ring costs a nap
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
  return count.load(std::memory_order_seq_cst);
}

void Bell::sleep(std::uint32_t seen, long nanoseconds) {
  const timespec duration{nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
  ::syscall(SYS_futex, &count, FUTEX_WAIT, seen, &duration, nullptr, 0);
}

void Bell::leave() { sleepers.fetch_sub(1, std::memory_order_seq_cst); }

Engine::Engine(c10d::Store& store, int rank, int size, std::string name, std::chrono::milliseconds timeout,
               EngineOptions options)
    : rank_(rank),
      size_(size),
      name_(std::move(name)),
      options_(std::move(options)),
      ring_bytes_(options_.ring_bytes ? options_.ring_bytes : ring_bytes_for(size)),
      forks_(count_forks()),
      sent_(static_cast<std::size_t>(size)),
      inboxes_(static_cast<std::size_t>(size)),
      warned_of_(static_cast<std::size_t>(size)) {
  ISOGRAD_INVARIANT(rank_ >= 0 && rank_ < size_, fmt::format("rank {} of {}", rank_, size_));
  ISOGRAD_INVARIANT(options_.chunks >= 1 && options_.chunk_bytes % 64 == 0 &&
                        options_.chunk_bytes >= 8 * static_cast<std::uint64_t>(size_),
                    fmt::format("{} chunks of {} bytes", options_.chunks, options_.chunk_bytes));
  ISOGRAD_INVARIANT(ring_bytes_ >= 64 && ring_bytes_ % 64 == 0,
                    fmt::format("rings of {} bytes", ring_bytes_));
  timeout = bounded(timeout);
  std::shared_ptr<Segment> staging;  // lives until the others can know why this rank gives up
  try {
    MemberInfo mine = describe_self();
    const std::uint64_t staging_bytes = rings_begin() + static_cast<std::uint64_t>(size_) * ring_bytes_;
    const std::string staging_purpose = fmt::format("the staging buffers of group '{}'", name_);
    const std::string control_purpose = fmt::format("the control block of group '{}'", name_);
    require_memory(staging_bytes * static_cast<std::uint64_t>(size_), available_memory(), staging_purpose);
    // Many groups run only small operations or none, so the rest is reserved on use.
    staging = Segment::create(staging_bytes, channels_bytes(), staging_purpose);
    mine.staging = staging->id();
    if (rank_ == 0) {
      control_segment_ = Segment::create(Control::bytes(size_), control_purpose);
      auto* control = new (control_segment_->data()) Control{};  // the pages are zero, and so are all atomics
      control->magic = Control::kMagic;
      control->size = size_;
      mine.control = control_segment_->id();
    }
    members_ = meet(store, rank_, size_, mine, name_, timeout);
    watch_ = std::make_unique<Watch>(members_);
    control_segment_ = open(store, 0, members_[0].control, control_purpose);
    control_ = reinterpret_cast<Control*>(control_segment_->data());
    ISOGRAD_INVARIANT(control_->magic == Control::kMagic && control_->size == size_,
                      fmt::format("magic {:x}, size {}", control_->magic, control_->size));
    for (int r = 0; r < size_; ++r) {
      const SegmentId& id = members_[static_cast<std::size_t>(r)].staging;
      staging_.push_back(r == rank_ ? staging : open(store, r, id, staging_purpose));
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

// A forked child has copies of its parent's groups. It may drop them but is no rank itself.
bool Engine::inherited() const { return forks.load(std::memory_order_relaxed) != forks_; }

void Engine::throw_if_inherited() const {
  if (!inherited()) return;
  refuse(fmt::format("group '{}' on rank {} of {}", name_, rank_, size_),
         "a process that was forked when the group existed already", "the process that joined the group",
         "Join after the fork, or leave all communication to the parent");
}

Engine::~Engine() {
  if (inherited()) return;
  control_->member(rank_).left.store(1, std::memory_order_seq_cst);
  control_->bell.ring();
}

void Engine::throw_not_joined(const std::string& found) const {
  throw_peer_error(fmt::format("joining group '{}' as rank {} of {}", name_, rank_, size_), found,
                   "every rank to join", "Look at that rank's output for the reason, then restart all ranks");
}

void Engine::throw_if_given_up(c10d::Store& store) const {
  const std::string reason = given_up(store);
  if (reason.empty()) return;
  throw RelayedError({.where = fmt::format("joining group '{}' as rank {} of {}", name_, rank_, size_),
                      .found = reason,
                      .expected = "every rank to join",
                      .action = "Fix what that rank reports, then restart all ranks"});
}

// Owners keep their descriptors until all have arrived. A missing descriptor means that its owner is ending,
// which may take a moment to show.
std::shared_ptr<Segment> Engine::open(c10d::Store& store, int owner, const SegmentId& id,
                                      const std::string& purpose) {
  constexpr auto kMoment = std::chrono::milliseconds(500);
  try {
    return Segment::open(id, purpose);
  } catch (const ConfigError&) {
    for (const auto begin = Clock::now(); Clock::now() - begin < kMoment;) {
      throw_if_given_up(store);
      const auto dead = watch_->dead();
      if (std::find(dead.begin(), dead.end(), owner) != dead.end())
        throw_not_joined(describe(owner, members_[static_cast<std::size_t>(owner)]) +
                         " ended before it had joined");
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    throw;
  }
}

// Barrier: a rank may close its segment's descriptor only after all ranks have mapped it.
void Engine::arrive(c10d::Store& store, std::chrono::milliseconds timeout) {
  control_->member(rank_).arrived.store(1, std::memory_order_seq_cst);
  const auto deadline = Clock::now() + timeout;
  auto nap = std::chrono::microseconds(20);
  for (;;) {
    const auto dead = watch_->dead();
    std::string missing, lost;
    for (int r = 0; r < size_; ++r) {
      if (control_->member(r).arrived.load(std::memory_order_acquire)) continue;
      const std::string name = describe(r, members_[static_cast<std::size_t>(r)]);
      missing += (missing.empty() ? "" : ", ") + name;
      if (std::find(dead.begin(), dead.end(), r) != dead.end()) lost += (lost.empty() ? "" : ", ") + name;
    }
    if (missing.empty()) return;
    throw_if_given_up(store);
    if (!lost.empty()) throw_not_joined(lost + " ended before it had joined");
    if (Clock::now() >= deadline)
      throw_not_joined(missing + fmt::format(" did not join within {} ms", timeout.count()));
    std::this_thread::sleep_for(nap);
    nap = std::min<std::chrono::microseconds>(nap * 2, std::chrono::milliseconds(5));
  }
}

Channel& Engine::channel(int from, int to) const {
  return reinterpret_cast<Channel*>(staging_[static_cast<std::size_t>(from)]->data())[to];
}

std::byte* Engine::message_ring(int from, int to) const {
  return staging_[static_cast<std::size_t>(from)]->data() + rings_begin() +
         static_cast<std::uint64_t>(to) * ring_bytes_;
}

void Engine::start(const std::shared_ptr<Task>& task) {
  throw_if_inherited();
  {
    const std::lock_guard lock(mutex_);
    task->engine_ = this;
    task->site_ = current_call_site();
    task->enter();
    history_.begin(task->fingerprint_, task->site_, task->number_);
    under_way_.push_back(task);
  }
  if (step(*task) == Moved::kComplete) return;
  const auto same = [this](const std::weak_ptr<Engine>& entry) { return entry.lock().get() == this; };
  if (std::none_of(busy.begin(), busy.end(), same)) busy.push_back(weak_from_this());
}

bool Engine::slot_is_free(std::uint64_t sequence) {
  if (sequence < kSlots) return true;
  const std::uint64_t before = sequence - kSlots;
  std::uint64_t& free_of = free_of_[sequence % kSlots];
  if (free_of == before + 1) return true;
  for (int r = 0; r < size_; ++r)
    if (step_of(control_->slot(r, before).done.load(std::memory_order_acquire), before) != kEverything)
      return false;
  free_of = before + 1;
  return true;
}

bool Engine::advance_all() {
  bool moved = false, staging_free = true;
  for (std::size_t i = 0; i < under_way_.size(); ++i) {
    Task& task = *under_way_[i];
    if (task.complete_) continue;  // still listed after another task failed
    // A task is not asked while there is no slot, because hundreds may be waiting for one.
    bool may_start = task.started_ || task.can_start();
    for (std::size_t j = 0; j < i && may_start && !task.started_; ++j)
      may_start = under_way_[j]->complete_ || !task.must_follow(*under_way_[j]);
    try {
      moved |= task.advance(may_start, staging_free);
    } catch (const std::exception& error) {  // after any exception the task cannot continue from the middle
      poison(error.what());
      throw;
    }
    staging_free &= task.complete_ || !task.holds_staging();
  }
  std::erase_if(under_way_, [](const auto& task) { return task->complete_; });
  return moved;
}

Engine::Moved Engine::step(Task& task) {
  throw_if_inherited();
  const std::lock_guard lock(mutex_);
  if (task.complete_) return Moved::kComplete;
  const bool moved = advance_all();
  if (task.complete_) return Moved::kComplete;
  if (poisoned()) {
    advance_all();  // what was published before the poison still counts
    if (task.complete_) return Moved::kComplete;
    throw_poison(task);
  }
  return moved ? Moved::kSomething : Moved::kNothing;
}

bool Engine::task_is_complete(const Task& task) {
  const std::lock_guard lock(mutex_);
  return task.complete_;
}

bool Engine::progress(Task& task, std::chrono::milliseconds timeout) {
  const Moved moved = step(task);
  if (moved != Moved::kNothing) return moved == Moved::kComplete;
  // A caller may poll for ever, so polling also checks the peers and the deadline.
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  if (task.polled_since_ == Clock::time_point{}) task.polled_since_ = now;
  if (now - last_look_ > kLookEvery) {
    last_look_ = now;
    look_after_peers(task, task.polled_since_, bounded(timeout));
  }
  return task.complete_;
}

// A peer may wait in another group for an operation of this rank there.
bool Engine::step_others() {
  bool moved = false;
  std::erase_if(busy, [&](const std::weak_ptr<Engine>& entry) {
    const std::shared_ptr<Engine> other = entry.lock();
    if (!other || other->inherited()) return true;
    if (other.get() == this) return false;
    const std::unique_lock lock(other->mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return false;
    try {
      moved |= other->advance_all();
    } catch (const std::exception&) {  // that group is poisoned now, and its waiters get the error
    }
    return other->under_way_.empty();
  });
  return moved;
}

void Engine::wait(Task& task, std::chrono::milliseconds timeout) {
  if (step(task) == Moved::kComplete) return;
  timeout = bounded(timeout);
  const auto since = Clock::now();
  auto last_moved = since, last_look = since;
  int spins = 0;
  for (;;) {
    Moved moved = step(task);
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
      moved = step(task);
      // Other groups have other bells.
      if (moved == Moved::kNothing)
        control_->bell.sleep(listener.seen, busy.size() > 1 ? kShortNapNanoseconds : kNapNanoseconds);
    }
    if (moved == Moved::kComplete) return;
    // A short timeout is exact to one nap. Checking the peers costs some system calls.
    const auto now = Clock::now();
    if (now - last_look >= std::min<Clock::duration>(kLookEvery, timeout / 4)) {
      last_look = now;
      look_after_peers(task, since, timeout);
    }
    if (task_is_complete(task)) return;
  }
}

void Engine::nap(std::chrono::microseconds longest) {
  const Listener listener(control_->bell);
  bool moved = false;
  {
    const std::lock_guard lock(mutex_);
    try {
      moved = advance_all();
    } catch (const std::exception&) {  // the group is poisoned now, and its waiters get the error
    }
  }
  if (!moved) control_->bell.sleep(listener.seen, std::chrono::nanoseconds(longest).count());
}

}  // namespace isograd::shm
