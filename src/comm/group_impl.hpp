// The code that the operations of Group share: checking arguments, calling the backend, completing.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <array>
#include <atomic>
#include <chrono>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "comm/call_site.hpp"
#include "isograd/error.hpp"
#include "isograd/group.hpp"

namespace isograd {

class HostsBackend;
class HostsOfGroup;
class ShmBackend;

struct Pending::State {
  virtual ~State() = default;
  virtual bool progress() = 0;
  virtual void wait() = 0;
};

// A user's call, kept for messages. Nothing is formatted before there is an error.
struct Call {
  const char* operation;
  Group::Site site;
  int other = -1;  // the root, or the other end of a message
};

// The backend has no such operation. All ranks know this before anything is sent.
class MissingOperation final : public ConfigError {
 public:
  using ConfigError::ConfigError;
};

// A collective that the backend has begun.
struct Started {
  c10::intrusive_ptr<c10d::Work> work;  // null: nothing to do, or complete
  std::vector<at::Tensor> kept;         // tensors that the backend reads and writes
  struct Copy {
    at::Tensor to, from;
  };
  std::vector<Copy> copies;  // results to copy to the caller's tensors once the work is complete
};

// The rows that split_rows assigns to part number `part`.
inline std::int64_t rows_of_part(std::int64_t rows, int parts, int part) {
  return rows / parts + (part < rows % parts ? 1 : 0);
}

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
  // Runs `wait`, which may throw, and adds its duration.
  template <typename Wait>
  auto timed(Wait&& wait) {
    struct Clock {
      std::atomic<std::int64_t>& sum;
      std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
      ~Clock() {
        const auto taken = std::chrono::steady_clock::now() - start;
        sum.fetch_add(std::chrono::nanoseconds(taken).count(), std::memory_order_relaxed);
      }
    } clock{nanoseconds_};
    return wait();
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
  static const std::shared_ptr<Impl>& messenger_of(const std::shared_ptr<Impl>& impl) {
    return impl->messenger ? impl->messenger : impl;
  }

  // Counts `turns` times (N - 1)/N of the whole buffer. The next rank of the ring may be on another host.
  // HostsBackend counts its own bytes between hosts.
  void count(TrafficCounter::Kind kind, const at::Tensor& whole, std::int64_t turns = 1) const;
  // `across`: the bytes of these that leave the host.
  void count_bytes(TrafficCounter::Kind kind, std::int64_t bytes, std::int64_t across) const;
  bool here(int other) const;  // whether `other` is on this rank's host, as far as is known

  bool alone() const { return size == 1; }
  // Skip empty tensors: some backends reject them.
  bool nothing_to_send(const at::Tensor& tensor) const { return !shm && tensor.numel() == 0; }

  // Checks of arguments; each throws ConfigError.
  void check(const Call& call, const at::Tensor& tensor, const char* which) const;
  void check_reduction(const Call& call, const at::Tensor& tensor, ReduceOp op) const;
  void check_root(const Call& call, int root) const;
  void check_peer(const Call& call, int peer, int tag) const;
  // `whole` must be [first, ...rest of part's sizes], of its type; the first `skip` sizes of part are not in
  // the rest.
  void check_stack(const Call& call, const at::Tensor& whole, const char* which, std::int64_t first,
                   const at::Tensor& part, std::int64_t skip) const;
  void check_has_rows(const Call& call, const at::Tensor& tensor, const char* which) const;
  // `rows` must have one number for each rank, with the sum `total`.
  void check_rows(const Call& call, const Rows& rows, std::int64_t total, const char* which) const;
  [[noreturn]] void refuse(const Call& call, std::string found, std::string expected,
                           std::string action) const;
  [[noreturn]] void lost(const Call& call, const char* what) const;
  [[noreturn]] void aborted(const Call& call) const;
  std::string where(const Call& call) const;

  // Runs `action` of the backend. An exception of a foreign backend becomes an error with the call's place.
  template <typename Action>
  auto guarded(const Call& call, Action&& action) const {
    const CallSiteScope scope({call.site.file_name(), static_cast<unsigned>(call.site.line())});
    try {
      return action();
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      lost(call, error.what());
    }
  }

  void complete(const Call& call, Started& started) const {
    const auto wait = [&] { return guarded(call, [&] { return started.work->wait(timeout); }); };
    if (started.work && !traffic.timed(wait)) aborted(call);
    if (!started.copies.empty()) copy_results(started);
  }
  static void copy_results(Started& started);
  static Pending pend(const std::shared_ptr<Impl>& impl, const Call& call, Started started);
  // Starts an operation (a member function below) and completes it.
  template <typename Operation, typename... Arguments>
  void now(const Call& call, Operation operation, Arguments&&... arguments) const {
    Started started = (this->*operation)(call, std::forward<Arguments>(arguments)...);
    complete(call, started);
  }
  // Starts it and returns it under way.
  template <typename Operation, typename... Arguments>
  static Pending later(const std::shared_ptr<Impl>& impl, const Call& call, Operation operation,
                       Arguments&&... arguments) {
    return pend(impl, call, (impl.get()->*operation)(call, std::forward<Arguments>(arguments)...));
  }
  template <typename Options>
  Options with_timeout() const {
    Options options;
    options.timeout = timeout;
    return options;
  }

  // Some backends require a shape of their own; all accept a flat one.
  void flatten(at::Tensor& from, at::Tensor& to) const {
    if (shm) return;
    const at::NoGradGuard no_graph;
    from = from.view(-1);
    to = to.view(-1);
  }

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
  at::Tensor plain_copy(const at::Tensor& tensor) const;
  at::Tensor plain_empty(const at::Tensor& like) const;
  at::Tensor plain_twin(const Call& call, const at::Tensor& tensor, bool read, Started& started) const;

  // The operations: check, then start.
  Started all_reduce(const Call& call, at::Tensor tensor, ReduceOp op) const;
  Started reduce(const Call& call, at::Tensor tensor, int root, ReduceOp op) const;
  Started reduce_scatter(const Call& call, at::Tensor output, at::Tensor input, ReduceOp op, const Rows& rows,
                         std::shared_ptr<double> squares) const;
  // Whether a reduce_scatter of this tensor without rows can return squares.
  bool can_square(const at::Tensor& input) const;
  static const std::shared_ptr<Impl>& of(const Group& group) { return group.impl_; }
  Started broadcast(const Call& call, at::Tensor tensor, int root) const;
  Started all_gather(const Call& call, at::Tensor output, at::Tensor input) const;
  Started all_gather_rows(const Call& call, at::Tensor output, at::Tensor input, const Rows& rows) const;
  Started gather(const Call& call, at::Tensor output, at::Tensor input, int root) const;
  Started scatter(const Call& call, at::Tensor output, at::Tensor input, int root) const;
  Started all_to_all(const Call& call, at::Tensor output, at::Tensor input, Rows output_rows,
                     Rows input_rows) const;
  Started send(const Call& call, at::Tensor tensor, int to, int tag) const;
  Started recv(const Call& call, at::Tensor tensor, int from, int tag) const;
  Started barrier(const Call& call) const;

  // The numbers of rows that all_gather_rows needs.
  Rows exchange_rows(const Call& call, const at::Tensor& input) const;
};

}  // namespace isograd
