#include "isograd_comm/meeting.hpp"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <thread>

#include "isograd/error.hpp"

namespace isograd::python {
namespace {

constexpr int kMostRanks = 64;
constexpr std::chrono::minutes kPatience{5};
// Longer than a rank needs to see that the moment was set; much shorter than a time slice.
constexpr std::chrono::microseconds kNotice{3};

std::int64_t nanoseconds(Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

// Every word has a cache line to itself: whoever waits for one is not disturbed by writes to another.
struct Meeting::Shared {
  struct alignas(64) Word {
    std::atomic<std::uint64_t> value;
  };
  Word arrived[kMostRanks];    // the number of the meeting that the rank has come to
  Word values[2][kMostRanks];  // of even and of odd meetings: a quick rank may be one meeting ahead
  Word opened;                 // the number of the meeting that rank 0 has set a moment for
  Word moment;                 // that moment
  Word ball;
};

Meeting::Meeting(c10d::Store& store, int rank, int size)
    : rank_(rank),
      size_(size),
      own_cores_(size <= static_cast<int>(std::max(1u, std::thread::hardware_concurrency()))) {
  if (size > kMostRanks) {
    throw ConfigError({.where = "a benchmark of collectives",
                       .found = std::to_string(size) + " ranks",
                       .expected = "at most " + std::to_string(kMostRanks),
                       .action = "Compare fewer ranks"});
  }
  const std::string key = "isograd/bench/meeting", purpose = "the meeting point of a benchmark";
  if (rank == 0) {
    segment_ = shm::Segment::create(sizeof(Shared), purpose);
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(&segment_->id());
    store.set(key, std::vector<std::uint8_t>(bytes, bytes + sizeof(shm::SegmentId)));
  } else {
    shm::SegmentId id;
    const auto bytes = store.get(key);
    std::memcpy(&id, bytes.data(), std::min(bytes.size(), sizeof id));
    segment_ = shm::Segment::open(id, purpose);
  }
  shared_ = reinterpret_cast<Shared*>(segment_->data());
  exchange(0);
  segment_->close_descriptor();
}

template <typename Condition>
void Meeting::wait_until(Condition&& condition) const {
  const auto deadline = Clock::now() + kPatience;
  // Few: who has finished must not keep a core from the threads of a contestant that has not.
  const int spins = own_cores_ ? 200 : 10;
  while (true) {
    for (int i = 0; i < spins; ++i) {
      if (condition()) return;
      pause_core();
    }
    sched_yield();
    if (Clock::now() > deadline) {
      throw PeerError({.where = "rank " + std::to_string(rank_) + " of a benchmark of collectives",
                       .found = "a rank that does not come",
                       .expected = "all ranks",
                       .action = "See what the other ranks printed"});
    }
  }
}

// Everything that a rank wrote before it arrived is visible to those that saw it arrive.
void Meeting::arrive() {
  ++meetings_;
  shared_->arrived[rank_].value.store(meetings_, std::memory_order_release);
}

void Meeting::start_together() {
  arrive();
  if (rank_ == 0) {
    for (int r = 1; r < size_; ++r)
      wait_until([&] { return shared_->arrived[r].value.load(std::memory_order_acquire) >= meetings_; });
    const auto moment = nanoseconds(Clock::now() + kNotice);
    shared_->moment.value.store(static_cast<std::uint64_t>(moment), std::memory_order_relaxed);
    shared_->opened.value.store(meetings_, std::memory_order_release);
  } else {
    wait_until([&] { return shared_->opened.value.load(std::memory_order_acquire) >= meetings_; });
  }
  if (!own_cores_) return;
  const auto moment = static_cast<std::int64_t>(shared_->moment.value.load(std::memory_order_relaxed));
  while (nanoseconds(Clock::now()) < moment) pause_core();
}

std::vector<double> Meeting::exchange(double mine) {
  auto& values = shared_->values[(meetings_ + 1) % 2];
  values[rank_].value.store(std::bit_cast<std::uint64_t>(mine), std::memory_order_relaxed);
  arrive();
  std::vector<double> all;
  for (int r = 0; r < size_; ++r) {
    wait_until([&] { return shared_->arrived[r].value.load(std::memory_order_acquire) >= meetings_; });
    all.push_back(std::bit_cast<double>(values[r].value.load(std::memory_order_relaxed)));
  }
  return all;
}

double Meeting::largest(double mine) {
  const auto all = exchange(mine);
  return *std::max_element(all.begin(), all.end());
}

double Meeting::round_trip() {
  constexpr int kBatches = 15, kTrips = 30;
  std::vector<double> batches;
  for (int batch = 0; size_ > 1 && batch < kBatches; ++batch) {
    start_together();
    const auto start = Clock::now();
    for (int trip = 0; trip < kTrips && rank_ < 2; ++trip) {
      // Even: at rank 0, odd: at rank 1.
      auto& ball = shared_->ball.value;
      wait_until([&] { return ball.load(std::memory_order_acquire) == 2 * trips_ + (rank_ == 1 ? 1 : 0); });
      ball.store(rank_ == 0 ? 2 * trips_ + 1 : 2 * trips_ + 2, std::memory_order_release);
      ++trips_;
    }
    if (rank_ == 0)
      wait_until([&] { return shared_->ball.value.load(std::memory_order_acquire) == 2 * trips_; });
    const std::chrono::duration<double> elapsed = Clock::now() - start;
    batches.push_back(elapsed.count() / kTrips);
  }
  if (batches.empty()) return 0;
  std::nth_element(batches.begin(), batches.begin() + kBatches / 2, batches.end());
  return exchange(batches[kBatches / 2])[0];
}

}  // namespace isograd::python
