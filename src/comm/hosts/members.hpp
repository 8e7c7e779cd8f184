// The hosts of a group's ranks, and the bytes that this rank has sent to other hosts.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace isograd {

// Bytes that this rank has sent in all groups of its world, and the part that left its host.
struct WorldBytes {
  std::atomic<std::int64_t> all{0}, across{0};
};

// The hosts of one group. Several threads of a rank may start operations.
class HostsOfGroup {
 public:
  // `of_rank`: the host number of each rank of the group.
  HostsOfGroup(std::vector<int> of_rank, int rank, std::shared_ptr<WorldBytes> world)
      : of_rank_(std::move(of_rank)),
        rank_(rank),
        several_(std::ranges::any_of(of_rank_, [this](int host) { return host != of_rank_[0]; })),
        world_(std::move(world)) {}

  bool several() const { return several_; }
  bool here(int rank) const { return of_rank_[static_cast<std::size_t>(rank)] == of(rank_); }
  // In a ring each rank sends to the next one.
  bool next_is_here() const { return here((rank_ + 1) % static_cast<int>(of_rank_.size())); }
  const std::vector<int>& of_rank() const { return of_rank_; }

  void add(std::int64_t bytes) { world_->all.fetch_add(bytes, std::memory_order_relaxed); }
  void add_across(std::int64_t bytes) {
    across_.fetch_add(bytes, std::memory_order_relaxed);
    world_->across.fetch_add(bytes, std::memory_order_relaxed);
  }
  // The bytes so far came from the self-test of the new group.
  void restart() { world_->across.fetch_sub(across_.exchange(0)); }
  std::int64_t across() const { return across_.load(std::memory_order_relaxed); }

 private:
  int of(int rank) const { return of_rank_[static_cast<std::size_t>(rank)]; }

  std::vector<int> of_rank_;
  int rank_;
  bool several_;
  std::shared_ptr<WorldBytes> world_;
  std::atomic<std::int64_t> across_{0};
};

}  // namespace isograd
