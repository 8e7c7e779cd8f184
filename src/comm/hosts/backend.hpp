// HostsBackend: collectives of ranks on several hosts. It uses shared memory within each host and the
// messages of any backend between hosts.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "comm/shm/backend.hpp"

namespace isograd {

// Bytes that this rank has sent in all groups of its world, and the part that left its host.
struct WorldBytes {
  std::atomic<std::int64_t> all{0}, across{0};
};

// The hosts of one group. Several threads of a rank may start operations.
class HostsOfGroup {
 public:
  // `of_rank`: the number of each rank's host in the world.
  HostsOfGroup(const std::vector<int>& of_rank, int rank, std::shared_ptr<WorldBytes> world)
      : rank_(rank), world_(std::move(world)) {
    for (const int number : of_rank) {
      const auto r = static_cast<int>(of_rank_.size());
      const auto at = static_cast<std::size_t>(std::ranges::find(numbers, number) - numbers.begin());
      if (at == numbers.size()) numbers.push_back(number), members.emplace_back();
      if (r == rank) host = at, place = members[at].size();
      members[at].push_back(r);
      of_rank_.push_back(at);
    }
  }

  // Hosts are in the order of their first ranks.
  std::vector<std::vector<int>> members{};  // ranks by host
  std::vector<int> numbers{};               // of the hosts in the world
  std::size_t host = 0, place = 0;          // this rank's host, and its place among the host's ranks

  bool several() const { return members.size() > 1; }
  bool here(int rank) const { return of_rank_[static_cast<std::size_t>(rank)] == host; }
  // In a ring each rank sends to the next one.
  bool next_is_here() const { return here((rank_ + 1) % static_cast<int>(of_rank_.size())); }

  void add(std::int64_t bytes) { world_->all.fetch_add(bytes, std::memory_order_relaxed); }
  void add_across(std::int64_t bytes) {
    across_.fetch_add(bytes, std::memory_order_relaxed);
    world_->across.fetch_add(bytes, std::memory_order_relaxed);
  }
  // The bytes so far came from the self-test of the new group.
  void restart() { world_->across.fetch_sub(across_.exchange(0)); }
  std::int64_t across() const { return across_.load(std::memory_order_relaxed); }

 private:
  std::vector<std::size_t> of_rank_{};
  int rank_;
  std::shared_ptr<WorldBytes> world_;
  std::atomic<std::int64_t> across_{0};
};

// A sum (maximum, ...) is made in rank order within each host, and these sums are added in the order of the
// hosts' first ranks: the same bits on all ranks and in every run, whatever the timing. 16-bit floats are
// sent as float32 and rounded once. all_reduce, reduce_scatter and all_gather send each host no more than it
// needs. Other operations are passed on to `all`.
//
// The first `lanes` ranks of each host are lanes, where `lanes` is the smallest number of ranks of a host.
// Only lanes send: each sends its part to the rank at its place on each other host. Hosts may have different
// numbers of ranks, in any order.
class HostsBackend : public c10d::Backend {
 public:
  struct Parts {
    c10::intrusive_ptr<c10d::Backend> all;  // all ranks: messages between hosts, and other operations
    c10::intrusive_ptr<ShmBackend> reducing, gathering;  // this host's ranks, in rank order; null: one rank
  };
  using c10d::Backend::Backend;
  virtual void give_up(const std::string& reason) noexcept = 0;
  // Collective: zero-filled memory that the ranks of this host share, so that they sum it in place.
  virtual at::Tensor empty_shared(std::int64_t numel, at::ScalarType dtype) = 0;
};

// `names`: the hosts' names, for errors. `hosts`: counts the bytes that leave this host.
c10::intrusive_ptr<HostsBackend> make_over_hosts(HostsBackend::Parts parts,
                                                 std::shared_ptr<HostsOfGroup> hosts,
                                                 const std::vector<std::string>& names, std::string group,
                                                 std::chrono::milliseconds timeout);

}  // namespace isograd
