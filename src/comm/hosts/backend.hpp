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

#include "comm/queue.hpp"
#include "comm/shm/backend.hpp"

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

// A sum (maximum, ...) is made in rank order within each host, and these sums are added in the order of the
// hosts' first ranks: the same bits on all ranks and in every run, whatever the timing. 16-bit floats are
// sent as float32 and rounded once. all_reduce, reduce_scatter and all_gather send each host no more than it
// needs. Other operations are passed on to `all`.
//
// The first `lanes` ranks of each host are lanes, where `lanes` is the smallest number of ranks of a host.
// Only lanes send: each sends its part to the rank at its place on each other host. Hosts may have different
// numbers of ranks, in any order.
class HostsBackend final : public c10d::Backend {
 public:
  using Works = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<Tensors>;
  using Splits = std::vector<std::int64_t>;

  struct Parts {
    c10::intrusive_ptr<c10d::Backend> all;  // all ranks: messages between hosts, and other operations
    c10::intrusive_ptr<ShmBackend> reducing, gathering;  // this host's ranks, in rank order; null: one rank
  };
  // `names`: the hosts' names, for errors. `hosts`: counts the bytes that leave this host.
  HostsBackend(Parts parts, std::shared_ptr<HostsOfGroup> hosts, const std::vector<std::string>& names,
               std::string group, std::chrono::milliseconds timeout);

  const std::string getBackendName() const override { return name_; }  // "shm+mpi"
  void setTimeout(std::chrono::milliseconds timeout) override { queue_->set_timeout(timeout); }
  void abort() override { give_up("this rank has given the group up"); }
  void give_up(const std::string& reason) noexcept { queue_->fail(reason); }

  Works allreduce(Tensors& tensors, const c10d::AllreduceOptions& options = {}) override;
  // All parts must be equal.
  Works _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                             const c10d::ReduceScatterOptions& options = {}) override;
  Works _allgather_base(at::Tensor& output, at::Tensor& input,
                        const c10d::AllgatherOptions& options = {}) override;

  // Passed on to `all`.
  Works reduce(Tensors& tensors, const c10d::ReduceOptions& options = {}) override {
    return pass_on("reduce", &c10d::Backend::reduce, options.timeout, tensors, options);
  }
  Works broadcast(Tensors& tensors, const c10d::BroadcastOptions& options = {}) override {
    return pass_on("broadcast", &c10d::Backend::broadcast, options.timeout, tensors, options);
  }
  Works gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options = {}) override {
    return pass_on("gather", &c10d::Backend::gather, options.timeout, outputs, inputs, options);
  }
  Works scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options = {}) override {
    return pass_on("scatter", &c10d::Backend::scatter, options.timeout, outputs, inputs, options);
  }
  Works alltoall_base(at::Tensor& output, at::Tensor& input, Splits& output_splits, Splits& input_splits,
                      const c10d::AllToAllOptions& options = {}) override {
    return pass_on("all_to_all", &c10d::Backend::alltoall_base, options.timeout, output, input, output_splits,
                   input_splits, options);
  }
  Works send(Tensors& tensors, int to, int tag) override {
    check_tag("send", tag);
    return pass_on("send", &c10d::Backend::send, c10d::kUnsetTimeout, tensors, to, tag);
  }
  Works recv(Tensors& tensors, int from, int tag) override {
    check_tag("recv", tag);
    return pass_on("recv", &c10d::Backend::recv, c10d::kUnsetTimeout, tensors, from, tag);
  }
  Works barrier(const c10d::BarrierOptions& options = {}) override {
    return pass_on("barrier", &c10d::Backend::barrier, options.timeout, options);
  }

  // Collective: zero-filled memory that the ranks of this host share, so that they sum it in place.
  at::Tensor empty_shared(std::int64_t numel, at::ScalarType dtype);

 private:
  // State that stages keep beyond the life of the backend.
  struct Links : std::enable_shared_from_this<Links> {
    Parts parts;
    std::shared_ptr<HostsOfGroup> hosts;
    std::vector<std::vector<int>> members;  // ranks of each host
    std::vector<std::string> names;
    int host = 0, place = 0;  // this rank's host, and its place on it
    int lanes = 0;            // the smallest number of ranks of a host
    bool even = true;         // all hosts have the same number of ranks

    int host_count() const { return static_cast<int>(members.size()); }
    int here() const { return static_cast<int>(members[static_cast<std::size_t>(host)].size()); }
    bool sends() const { return place < lanes; }
    // How `numel` elements are split over the ranks of this host. Only lanes get a part.
    Splits cut(std::int64_t numel) const;
    // The ranks' tensors by host, in the order of the host's ranks.
    Lists by_host(const Tensors& of_ranks) const;
    // Stages of sums. sum_within sums pieces[i] over the ranks of this host into sums[i]. sum_between sums
    // this lane's sums of all hosts into `own`, which may be this host's sum.
    queue::Stage sum_within(Lists pieces, Tensors sums, const c10d::ReduceOp& op) const;
    queue::Stage sum_between(Tensors sums, at::Tensor own, const shm::Reduction& reduction) const;
    // Sends to_hosts[h] to this lane's rank on each other host h and receives from_hosts[h] from it.
    std::vector<queue::Part> exchange(const Tensors& to_hosts, const Tensors& from_hosts, int tag) const;
  };

  template <typename Method, typename... Arguments>
  Works pass_on(const char* operation, Method method, std::chrono::milliseconds timeout,
                Arguments&... arguments) {
    return queue_->follow(
        operation,
        [&](const std::string&) { return queue::polled((links_->parts.all.get()->*method)(arguments...)); },
        timeout);
  }
  shm::Arguments arguments(const char* operation) const {
    return {operation, group_, rank_, size_, name_.c_str()};
  }
  shm::Reduction reduction(const shm::Arguments& check, const at::Tensor& tensor,
                           const c10d::ReduceOp& op) const;
  void check_tag(const char* operation, int tag) const;

  std::string group_, name_;
  std::shared_ptr<const Links> links_;
  std::shared_ptr<queue::Queue> queue_;
};

}  // namespace isograd
