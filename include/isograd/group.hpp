// Group: the ranks along one or more axes, with collectives, a timeout and a name.
#pragma once

#include "isograd/error.hpp"

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <source_location>
#include <string>
#include <vector>

namespace c10d {
class Backend;
}

namespace isograd {

// kAverage exists only to be refused with a reason (ConfigError): gradients are summed, and one place divides
// (docs/losses.md).
enum class ReduceOp { kSum, kMax, kMin, kProduct, kAverage };

// A collective in flight. Destroying it without wait() is allowed only after an error.
class Pending {
 public:
  struct State;  // implemented by the backend adapter
  Pending() = default;
  explicit Pending(std::shared_ptr<State> state) : state_(std::move(state)) {}

  // Advances the collective as far as possible without waiting. True once complete. Later backward hooks call
  // it, so that communication overlaps without a helper thread.
  bool progress();
  // Completes it. Throws PeerError after the group's timeout, or at once when a peer is known to be lost.
  void wait();

 private:
  std::shared_ptr<State> state_;
};

struct GroupOptions {
  // Runs a known-answer test of every collective before the group is used (a few KB). PeerError on all ranks
  // names the collective with the wrong answer. Makes the constructor collective.
  bool self_test = true;
};

// Splits `rows` (dim 0) over `parts` ranks as evenly as possible; the first ranks get one more.
std::vector<std::int64_t> split_rows(std::int64_t rows, int parts);

// Traffic of collectives as ring algorithms count it, whatever the backend does: each rank sends (N - 1)/N of
// the whole buffer in a reduce-scatter or all-gather, twice that in an all-reduce, and the parts that leave
// it in an all-to-all. Ranks have the same figures, except for messages and uneven parts.
struct Traffic {
  struct Operation {
    std::int64_t calls = 0;
    std::int64_t bytes = 0;
  };
  std::map<std::string, Operation> operations{};  // by name: "all_reduce", ...
  double waited_seconds = 0;                      // for operations to end, with this rank's own copying
  std::int64_t bytes() const;                     // of all operations
};

// Copyable handle. Every rank of the group calls the same operations in the same order; send and receive
// concern two ranks only. Tensors are on the backend's device and may be empty. A tensor that is not
// contiguous goes through a contiguous copy and back. For bool, sum is "or" and product is "and". Every
// operation has an asynchronous form: it keeps its tensors alive, and they must not be used until wait()
// returns. ConfigError on invalid arguments; PeerError when a rank is lost, late or calls something else.
// Both name the place of the call in the source. In a group of one rank operations only copy.
class Group {
 public:
  using Site = std::source_location;
  using Rows = std::vector<std::int64_t>;

  static Group solo();  // the group of one rank: no backend, every collective is the identity

  // Wraps any c10d backend (shm, NCCL, Gloo, MPI, ...). `name` appears in every error.
  Group(c10::intrusive_ptr<c10d::Backend> backend, std::string name, std::chrono::milliseconds timeout,
        GroupOptions options = {});

  int rank() const;
  int size() const;
  const std::string& name() const;
  std::chrono::milliseconds timeout() const;

  // In place. The sum is taken in the order of ranks from 0, however it is chunked: the same bits run to run
  // and on all ranks. bf16/fp16 sums accumulate in fp32. (Other backends have their own order.)
  void all_reduce(at::Tensor tensor, ReduceOp op = ReduceOp::kSum, Site site = Site::current());
  Pending all_reduce_async(at::Tensor tensor, ReduceOp op = ReduceOp::kSum, Site site = Site::current());

  // In place on `root`; other ranks' tensors keep their values.
  void reduce(at::Tensor tensor, int root, ReduceOp op = ReduceOp::kSum, Site site = Site::current());
  Pending reduce_async(at::Tensor tensor, int root, ReduceOp op = ReduceOp::kSum,
                       Site site = Site::current());

  // Overwrites `tensor` with root's tensor.
  void broadcast(at::Tensor tensor, int root, Site site = Site::current());
  Pending broadcast_async(at::Tensor tensor, int root, Site site = Site::current());

  // Same shape and dtype on every rank; returns [size(), ...input.sizes()], by rank.
  at::Tensor all_gather(const at::Tensor& input, Site site = Site::current());
  Pending all_gather_async(at::Tensor output, at::Tensor input, Site site = Site::current());

  // Concatenates the ranks' rows (dim 0); ranks may have different numbers of rows, 0 included. The first
  // form exchanges the numbers first; the second is given them, and `output` has their sum.
  at::Tensor all_gather_rows(const at::Tensor& input, Site site = Site::current());
  Pending all_gather_rows_async(at::Tensor output, at::Tensor input, Rows rows, Site site = Site::current());

  // Combines the ranks' inputs; each rank gets its rows of the result: split_rows of dim 0, or `rows`.
  at::Tensor reduce_scatter(const at::Tensor& input, ReduceOp op = ReduceOp::kSum,
                            Site site = Site::current());
  Pending reduce_scatter_async(at::Tensor output, at::Tensor input, ReduceOp op = ReduceOp::kSum,
                               Rows rows = {}, Site site = Site::current());

  // Same shape on every rank; returns [size(), ...input.sizes()] on `root`, an undefined tensor elsewhere.
  at::Tensor gather(const at::Tensor& input, int root, Site site = Site::current());
  Pending gather_async(at::Tensor output, at::Tensor input, int root, Site site = Site::current());

  // `output` becomes root's input[rank()]; `input` is [size(), ...output.sizes()] on root, ignored elsewhere.
  void scatter(at::Tensor output, const at::Tensor& input, int root, Site site = Site::current());
  Pending scatter_async(at::Tensor output, at::Tensor input, int root, Site site = Site::current());

  // Sends part r (of dim 0) to rank r; returns the parts from rank 0, 1, ... The plain form has equal parts
  // (ConfigError otherwise). Otherwise input_rows[r] go to rank r and output_rows[r] come from it.
  at::Tensor all_to_all(const at::Tensor& input, Site site = Site::current());
  at::Tensor all_to_all(const at::Tensor& input, Rows output_rows, Rows input_rows,
                        Site site = Site::current());
  Pending all_to_all_async(at::Tensor output, at::Tensor input, Rows output_rows = {}, Rows input_rows = {},
                           Site site = Site::current());

  // Messages between two ranks arrive in the order in which they were sent, per tag. A send may return before
  // it is received. Sender and receiver must agree on size and dtype.
  void send(const at::Tensor& tensor, int to, int tag = 0, Site site = Site::current());
  Pending send_async(at::Tensor tensor, int to, int tag = 0, Site site = Site::current());
  void recv(at::Tensor tensor, int from, int tag = 0, Site site = Site::current());
  Pending recv_async(at::Tensor tensor, int from, int tag = 0, Site site = Site::current());

  void barrier(Site site = Site::current());

  // Returns a zero-filled flat tensor, in memory that all ranks reach where the backend has such memory on
  // `device`: collectives inside it need no copy. Collective, with the same arguments on all ranks.
  at::Tensor empty_shared(std::int64_t numel, at::ScalarType dtype, at::Device device = at::kCPU);

  // Returns one zero-filled flat tensor for all ranks of the group: after a barrier, each rank reads what the
  // others wrote. Collective, with the same arguments on all ranks. ConfigError where the backend has no such
  // memory. Not for collectives, which write where others read.
  at::Tensor host_shared(std::int64_t numel, at::ScalarType dtype);
  bool has_host_memory() const;  // whether host_shared() works

  // Traffic of this rank in this group so far.
  Traffic traffic() const;

  // Tells the other ranks that this one failed; they raise PeerError with `reason` instead of waiting.
  void poison(const std::string& reason) noexcept;

  struct Impl;

 private:
  explicit Group(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<Impl> impl_;
};

}  // namespace isograd

// A collective is a linear map A of all ranks' inputs together; the gradient goes through its adjoint:
//
//   forward                        | backward
//   -------------------------------+-------------------------------------
//   all_reduce (sum)               | all_reduce (sum)
//   reduce (sum) to root           | broadcast from root
//   broadcast from root            | reduce (sum) to root
//   all_gather                     | reduce_scatter (sum)
//   all_gather_rows                | reduce_scatter (sum) of these rows
//   reduce_scatter (sum)           | all_gather_rows
//   gather to root                 | scatter from root
//   scatter from root              | gather to root
//   all_to_all                     | all_to_all, the numbers of rows swapped
//   send                           | recv
//   recv                           | send
//
// Both sides sum and never average. Results are new tensors; inputs are not changed.
//
// The backward is a collective too: every rank must reach it. Therefore a floating-point result always
// requires a gradient (where gradients are enabled), and backward() must be called on something that depends
// on it, on every rank. Where a rank has no result (reduce and gather on ranks other than root, send) it gets
// zeros or a tensor without elements to keep the graph together: add its sum() to the loss. Ranks that build
// the same graph run the backwards in the same order, the reverse of their forwards. Backwards can be
// differentiated again. Integers pass through.
namespace isograd::differentiable {

// Collectives with gradients: the backward of each is the dual collective.

at::Tensor all_reduce(Group group, const at::Tensor& input);

// Returns the sum on root, zeros elsewhere.
at::Tensor reduce(Group group, const at::Tensor& input, int root);

// Returns root's input. Elsewhere only the input's sizes and type matter; its gradient is zero.
at::Tensor broadcast(Group group, const at::Tensor& input, int root);

// [size, ...input.sizes()]
at::Tensor all_gather(Group group, const at::Tensor& input);

// Concatenates the ranks' rows (dim 0); the first form exchanges the numbers of rows.
at::Tensor all_gather_rows(Group group, const at::Tensor& input);
at::Tensor all_gather_rows(Group group, const at::Tensor& input, const Group::Rows& rows);

// Returns this rank's rows of the sum: split_rows of dim 0, or `rows`.
at::Tensor reduce_scatter(Group group, const at::Tensor& input, const Group::Rows& rows = {});

// [size, ...input.sizes()] on root; [0, ...input.sizes()] elsewhere.
at::Tensor gather(Group group, const at::Tensor& input, int root);

// Returns root's input[rank]. `input` is [size, ...] on root. Elsewhere it is [n, ...] with any n, e.g. 0;
// only its other sizes and its type matter, and its gradient is zero.
at::Tensor scatter(Group group, const at::Tensor& input, int root);

// Exchanges equal parts of dim 0, or input_rows[r] to rank r and output_rows[r] from it.
at::Tensor all_to_all(Group group, const at::Tensor& input, const Group::Rows& output_rows = {},
                      const Group::Rows& input_rows = {});

// Sends `input`; the result has no elements ([0]).
at::Tensor send(Group group, const at::Tensor& input, int to, int tag = 0);

// Returns what rank `from` sent, with the sizes and type of `like`, whose gradient is zero. Autograd's
// grad(), unlike backward(), runs only nodes that lead to the tensors it is asked for: give it a `like` that
// does.
at::Tensor recv(Group group, const at::Tensor& like, int from, int tag = 0);

}  // namespace isograd::differentiable
