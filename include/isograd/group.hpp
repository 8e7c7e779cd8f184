// Group: the ranks along one or more axes, with collectives, a timeout and a name.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

namespace c10d {
class Backend;
}

namespace isograd {

// There is no mean: gradients are only ever summed, and one place divides (docs/losses.md).
enum class ReduceOp { kSum, kMax, kMin };

// A collective under way. Destroying it without wait() is allowed only after an error.
class Pending {
 public:
  struct State;  // implemented by the backend adapter
  Pending() = default;
  explicit Pending(std::shared_ptr<State> state) : state_(std::move(state)) {}

  // Does whatever part of the collective can be done now without waiting. True once complete.
  // Called from later backward hooks, so that communication overlaps without a helper thread.
  bool progress();
  // Completes it. Throws PeerError after the group's timeout, or at once when a peer is known to be lost.
  void wait();

 private:
  std::shared_ptr<State> state_;
};

// Copyable handle. Every rank of the group calls the same operations in the same order. Tensors are on the
// device the backend serves; they must be contiguous unless said otherwise. A group of one rank does nothing.
class Group {
 public:
  static Group solo();  // the group of one rank: no backend, every collective is the identity

  // Wraps any c10d backend (shm, NCCL, Gloo, MPI, ...). `name` appears in every error.
  Group(c10::intrusive_ptr<c10d::Backend> backend, std::string name, std::chrono::milliseconds timeout);

  int rank() const;
  int size() const;
  const std::string& name() const;
  std::chrono::milliseconds timeout() const;

  // In place. Summation order is by rank, 0 first, whatever the chunking: same bits run to run and on all
  // ranks. bf16/fp16 sums accumulate in fp32.
  void all_reduce(at::Tensor tensor, ReduceOp op = ReduceOp::kSum);
  Pending all_reduce_async(at::Tensor tensor, ReduceOp op = ReduceOp::kSum);

  // Overwrites `tensor` with root's.
  void broadcast(at::Tensor tensor, int root);

  // Same shape and dtype on every rank; returns [size(), ...tensor.sizes()], rank-major.
  at::Tensor all_gather(const at::Tensor& tensor);

  void barrier();

  // Zero-filled flat tensor in memory that all ranks of the group can reach, where the backend has such
  // memory (reductions inside it need no copy); an ordinary tensor otherwise. Collective: same arguments on
  // all ranks.
  at::Tensor empty_shared(std::int64_t numel, at::ScalarType dtype);

  // Tells the other ranks that this one fails with `reason`; they raise PeerError with it instead of waiting.
  void poison(const std::string& reason) noexcept;

  struct Impl;

 private:
  explicit Group(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<Impl> impl_;
};

}  // namespace isograd
