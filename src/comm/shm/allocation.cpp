// Memory of all ranks that operations use in place.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>

#include "base/refuse.hpp"
#include "comm/shm/engine.hpp"
#include "comm/shm/operation.hpp"
#include "isograd/error.hpp"

namespace isograd::shm {
namespace {
constexpr std::uint64_t kPage = 4096;
}

// The data, then a page with the number of ranks that have released it.
std::uint64_t Allocation::segment_bytes(std::uint64_t bytes) {
  return (bytes + kPage - 1) / kPage * kPage + kPage;
}

Allocation::Allocation(std::int64_t id, int rank, std::uint64_t bytes, std::uint64_t first_bytes,
                       std::vector<std::shared_ptr<Segment>> segments)
    : id_(id),
      rank_(rank),
      process_(::getpid()),
      bytes_(bytes),
      first_bytes_(first_bytes),
      segments_(std::move(segments)) {}

bool Allocation::holds(const void* begin, std::uint64_t bytes) const {
  const auto* first = static_cast<const std::byte*>(begin);
  return first >= own() && first + bytes <= own() + bytes_;
}

std::atomic<std::uint32_t>& Allocation::releases() const {
  return *reinterpret_cast<std::atomic<std::uint32_t>*>(data(0) + segment_bytes(first_bytes_) - kPage);
}

void Allocation::release() {
  if (::getpid() != process_) return;  // a forked child drops its copy: the rank still has its own
  releases().fetch_add(1, std::memory_order_acq_rel);
}

bool Allocation::released_by_all() const {
  return releases().load(std::memory_order_acquire) == segments_.size();
}

Location Engine::locate(const void* begin, std::uint64_t bytes) const {
  if (bytes == 0) return {};
  const auto* first = static_cast<const std::byte*>(begin);
  const auto after = places_.upper_bound(first);
  if (after != places_.begin()) {
    const Allocation& allocation = *std::prev(after)->second;
    if (allocation.holds(begin, bytes))
      return {allocation.id(), static_cast<std::uint64_t>(first - allocation.own())};
  }
  return {.allocation = Location::kPrivate};
}

std::byte* Engine::shared_data(int rank, const Location& location) const {
  const auto found = allocations_.find(location.allocation);
  ISOGRAD_INVARIANT(found != allocations_.end(), fmt::format("allocation {}", location.allocation));
  return found->second->data(rank) + location.offset;
}

void Engine::sweep() {
  const std::lock_guard lock(mutex_);
  std::erase_if(allocations_, [this](const auto& entry) {
    if (!entry.second->released_by_all())
      return false;  // checked once, because a peer may release at any moment
    places_.erase(entry.second->own());
    return true;
  });
}

void Engine::remember(const std::shared_ptr<Allocation>& allocation) {
  const std::lock_guard lock(mutex_);
  allocations_[allocation->id()] = allocation;
  places_[allocation->own()] = allocation.get();
}

void Engine::forget(const Allocation& allocation) {
  const std::lock_guard lock(mutex_);
  places_.erase(allocation.own());
  allocations_.erase(allocation.id());
}

std::vector<Payload> Engine::exchange(const Fingerprint& print, const Payload& mine,
                                      std::chrono::milliseconds timeout) {
  const auto received = std::make_shared<std::vector<Payload>>();
  const auto operation = shm::exchange(print, mine, received);
  start(operation);
  wait(*operation, timeout);
  return *received;
}

std::shared_ptr<Allocation> Engine::allocate(std::uint64_t bytes, Copies copies, std::int8_t dtype,
                                             std::int64_t count, std::chrono::milliseconds timeout) {
  sweep();
  const bool one = copies == Copies::kOne;
  const std::uint64_t own_bytes = one && rank_ != 0 ? 0 : bytes;
  const std::uint64_t segment_bytes = Allocation::segment_bytes(own_bytes);
  const std::string purpose = fmt::format("a buffer of {} elements {} in group '{}'", count,
                                          one ? "for all ranks" : "per rank", name_);
  // It reveals ranks that ask for different things.
  const auto print = [&](int stage) {
    return Fingerprint{.kind = Kind::kAllocate,
                       .dtype = dtype,
                       .stage = static_cast<std::uint8_t>(stage + (one ? 3 : 0)),
                       .count = count};
  };
  const auto id = [&] {
    const std::lock_guard lock(mutex_);
    return static_cast<std::int64_t>(next_sequence_);
  }();

  // All ranks measure before any takes memory, and all use the smallest number, so they agree.
  std::uint64_t available = ~std::uint64_t{0};
  for (const Payload& each : exchange(print(0), {{available_memory()}}, timeout))
    available = std::min(available, each.words[0]);
  const std::uint64_t all_bytes =
      Allocation::segment_bytes(bytes) +
      Allocation::segment_bytes(one ? 0 : bytes) * static_cast<std::uint64_t>(size_ - 1);
  require_memory(all_bytes, available, purpose);

  // The reservation may still fail (a limit of one process, a race with others).
  std::string trouble;
  std::shared_ptr<Segment> mine;
  std::vector<std::shared_ptr<Segment>> segments;
  const auto attempt = [&](auto&& action) {
    try {
      if (trouble.empty()) action();
    } catch (const std::exception& error) {
      trouble = error.what();
    }
  };
  const auto agree_on_trouble = [&](const std::vector<Payload>& all) {
    for (int r = 0; r < size_; ++r) {
      if (all[static_cast<std::size_t>(r)].words[0] != 0) continue;
      refuse("shared memory for " + purpose,
             r == rank_ ? trouble : fmt::format("rank {} could not reserve its part", r),
             one ? fmt::format("{} bytes", all_bytes)
                 : fmt::format("{} bytes on each of {} ranks", segment_bytes, size_),
             "Use fewer ranks or smaller buffers, or raise the limit that the rank names");
    }
  };
  attempt([&] { mine = Segment::create(segment_bytes, purpose); });
  Payload words;
  if (mine) {
    const SegmentId& own = mine->id();
    words = {{static_cast<std::uint64_t>(own.pid) << 32 | static_cast<std::uint32_t>(own.descriptor),
              own.inode, own.bytes}};
  }
  const auto ids = exchange(print(1), words, timeout);
  agree_on_trouble(ids);
  attempt([&] {
    for (int r = 0; r < size_; ++r) {
      const auto& w = ids[static_cast<std::size_t>(r)].words;
      const SegmentId other{static_cast<std::int32_t>(w[0] >> 32),
                            static_cast<std::int32_t>(w[0] & 0xffffffffu), w[1], w[2]};
      segments.push_back(r == rank_ ? mine : Segment::open(other, purpose));
    }
  });
  // The allocation is registered before any rank can return. A peer that returns may name it at once in a
  // message for a receive that this rank started earlier.
  std::shared_ptr<Allocation> allocation;
  attempt([&] {
    allocation = std::make_shared<Allocation>(id, rank_, own_bytes, bytes, std::move(segments));
    remember(allocation);
  });
  try {
    agree_on_trouble(exchange(print(2), {{trouble.empty() ? 1u : 0u}}, timeout));
  } catch (...) {
    if (allocation) forget(*allocation);
    throw;
  }
  mine->close_descriptor();
  return allocation;
}

}  // namespace isograd::shm
