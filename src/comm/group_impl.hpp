// The parts of Group that its operations, the world and the tests share.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <array>
#include <atomic>
#include <chrono>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "comm/call.hpp"
#include "isograd/error.hpp"
#include "isograd/group.hpp"

namespace isograd {

class HostsBackend;
class HostsOfGroup;
class ShmBackend;

// Tests every collective and the messages of `group` with inputs that distinguish rank, collective and index.
// Collective. PeerError on all ranks names a collective with a wrong answer.
void self_test(Group group, c10::Device device = c10::kCPU);

// The backend has no such operation. All ranks know this before anything is sent.
class MissingOperation final : public ConfigError {
 public:
  using ConfigError::ConfigError;
};

// A collective that the backend has begun.
struct Started {
  c10::intrusive_ptr<c10d::Work> work{};  // null: nothing to do, or complete
  Tensors kept{};                         // tensors that the backend reads and writes
  struct Copy {
    at::Tensor to, from;
  };
  std::vector<Copy> copies{};  // results to copy to the caller's tensors once the work is complete
};

// Counts the bytes that a group moves. Several threads of a rank may start operations.
class TrafficCounter {
 public:
  enum Kind : std::size_t {
    kAllReduce,
    kReduce,
    kReduceScatter,
    kBroadcast,
    kAllGather,
    kGather,
    kScatter,
    kAllToAll,
    kSend,
    kBarrier,
    kKinds
  };
  void add(Kind kind, std::int64_t bytes) {
    calls_[kind].fetch_add(1, std::memory_order_relaxed);
    bytes_[kind].fetch_add(bytes, std::memory_order_relaxed);
  }
  void add_wait(std::chrono::nanoseconds taken) {
    nanoseconds_.fetch_add(taken.count(), std::memory_order_relaxed);
  }
  Traffic read() const;

 private:
  std::array<std::atomic<std::int64_t>, kKinds> calls_{}, bytes_{};
  std::atomic<std::int64_t> nanoseconds_{0};
};

struct Group::Impl {
  c10::intrusive_ptr<c10d::Backend> backend;  // null: a group of one rank
  ShmBackend* shm = nullptr;                  // `backend`, where it is a ShmBackend
  HostsBackend* over_hosts = nullptr;         // `backend`, where it is a HostsBackend
  std::shared_ptr<HostsOfGroup> hosts{};      // null: the hosts are unknown
  // Sends and receives in place of the backend. NCCL's first send waits on the host for its receiver, where
  // no timeout applies: ranks whose messages cross would wait for ever. Null: the backend sends.
  std::shared_ptr<Impl> messenger{};
  // The device whose memory the backend moves. A tensor elsewhere is copied there and back.
  at::Device device = at::kCPU;
  std::string name;
  std::chrono::milliseconds timeout{};
  int rank = 0;
  int size = 1;
  mutable TrafficCounter traffic;

  static std::shared_ptr<Impl> wrap(c10::intrusive_ptr<c10d::Backend> backend, std::string name,
                                    std::chrono::milliseconds timeout);
  // `messages`: carries sends and receives, if given (messenger).
  static Group make_group(c10::intrusive_ptr<c10d::Backend> backend,
                          c10::intrusive_ptr<c10d::Backend> messages, const std::string& name,
                          std::chrono::milliseconds timeout, GroupOptions options);
  static const std::shared_ptr<Impl>& of(const Group& group) { return group.impl_; }
  static const std::shared_ptr<Impl>& messenger_of(const std::shared_ptr<Impl>& impl) {
    return impl->messenger ? impl->messenger : impl;
  }

  Call call(const char* operation, const Site& site) const {
    return {operation, name, rank, size, "", {site.file_name(), static_cast<unsigned>(site.line())}};
  }
  bool alone() const { return size == 1; }
  bool is_here(int other) const;  // whether `other` is on this rank's host, as far as is known

  // Counts `turns` times (N - 1)/N of the whole buffer. The next rank of the ring may be on another host.
  // HostsBackend counts its own bytes between hosts.
  void count(TrafficCounter::Kind kind, const at::Tensor& whole, std::int64_t turns = 1) const;
  // `across`: the bytes of these that leave the host.
  void count_bytes(TrafficCounter::Kind kind, std::int64_t bytes, std::int64_t across) const;

  // Runs `action` of the backend. An exception of a foreign backend becomes an error with the call's place.
  template <typename Action>
  auto guarded(const Call& call, Action&& action) const;
  [[noreturn]] static void lost(const Call& call, const std::string& found);
  void complete(const Call& call, Started& started) const;

  // Starts an operation, which is a function of group.cpp, and completes it.
  template <typename Operation, typename... Arguments>
  void now(const Call& call, Operation operation, Arguments&&... arguments) const;
  // Starts it and returns it under way.
  template <typename Operation, typename... Arguments>
  static Pending later(const std::shared_ptr<Impl>& impl, const Call& call, Operation operation,
                       Arguments&&... arguments);
  static Pending pend(const std::shared_ptr<Impl>& impl, const Call& call, Started started);

  // The tensor in a form that backends can read: itself or a copy.
  at::Tensor readable(at::Tensor tensor) const {
    return is_plain(tensor) ? std::move(tensor) : plain_copy(tensor);
  }
  // As readable(), for a tensor that is written to. A copy is copied back on completion. `read`: its values
  // matter.
  at::Tensor writable(const Call& call, at::Tensor tensor, bool read, Started& started) const {
    return is_plain(tensor) ? std::move(tensor) : plain_twin(call, tensor, read, started);
  }
  bool is_plain(const at::Tensor& tensor) const {
    return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg() && tensor.device() == device;
  }
  at::Tensor plain_empty(const at::Tensor& like) const;
  at::Tensor plain_copy(const at::Tensor& tensor) const;
  at::Tensor plain_twin(const Call& call, const at::Tensor& tensor, bool read, Started& started) const;
};

}  // namespace isograd
