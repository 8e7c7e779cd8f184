// MpiBackend: every c10d collective by MPI's non-blocking calls, for CPU ranks on several hosts.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <mpi.h>

#include <chrono>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "base/refuse.hpp"
#include "base/torch_versions.hpp"
#include "comm/mpi/mpi.hpp"
#include "comm/mpi/numbers.hpp"
#include "comm/mpi/runtime.hpp"
#include "comm/mpi/work.hpp"
#include "comm/poll.hpp"
#include "isograd/error.hpp"

namespace isograd {

using c10d::OpType;
using mpi::copied_type;
using mpi::data_of;
using mpi::Operand;

// Tensors are contiguous and on the CPU. Copies: any type. Reductions: SUM, MAX, MIN, PRODUCT of float64,
// float32, bfloat16, float16 (16-bit floats are combined in float32 and rounded once), int64, int32, int16,
// int8, uint8, bool (or, or, and, and); AVG and PREMUL_SUM for PyTorch; BAND, BOR, BXOR of integers. MPI
// determines the order of summation. Mismatched calls are detected only where MPI detects them. MPI advances
// only while somebody waits or polls.
class MpiBackend final : public c10d::Backend {
 public:
  // Takes ownership of `comm`.
  MpiBackend(MPI_Comm comm, std::string name, std::chrono::milliseconds timeout,
             std::int64_t most_elements = mpi::kMostElements);

  const std::string getBackendName() const override { return "mpi"; }
  void setTimeout(std::chrono::milliseconds timeout) override { channel_->set_timeout(timeout); }
  // Later calls and waits on this rank throw. Its process then ends without MPI_Finalize, so mpirun ends the
  // other ranks.
  void abort() override;

  using Works = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using Sizes = std::vector<std::int64_t>;
  Works allreduce(Tensors& tensors, const c10d::AllreduceOptions& options = {}) override;
  Works allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options = {}) override;
  Works reduce(Tensors& tensors, const c10d::ReduceOptions& options = {}) override;
  Works broadcast(Tensors& tensors, const c10d::BroadcastOptions& options = {}) override;
  // The tensors of a list may differ in size.
  Works allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                  const c10d::AllgatherOptions& options = {}) override;
  Works allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                            const c10d::AllgatherOptions& options = {}) override;
  Works _allgather_base(at::Tensor& output, at::Tensor& input,
                        const c10d::AllgatherOptions& options = {}) override;
  Works allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                        const c10d::AllgatherOptions& options = {}) override;
  Works gather(std::vector<Tensors>& outputs, Tensors& inputs,
               const c10d::GatherOptions& options = {}) override;
  Works scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                const c10d::ScatterOptions& options = {}) override;
  Works reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                       const c10d::ReduceScatterOptions& options = {}) override;
  Works _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                             const c10d::ReduceScatterOptions& options = {}) override;
  Works reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                        const c10d::ReduceScatterOptions& options = {}) override;
  // Splits are numbers of rows (dim 0). Without splits the parts are equal.
  Works alltoall_base(at::Tensor& output, at::Tensor& input, Sizes& output_splits, Sizes& input_splits,
                      const c10d::AllToAllOptions& options = {}) override;
  Works alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options = {}) override;
  Works send(Tensors& tensors, int to, int tag) override;
  Works recv(Tensors& tensors, int from, int tag) override;
  Works recvAnysource(Tensors& tensors, int tag) override;
  Works barrier(const c10d::BarrierOptions& options = {}) override;

 private:
  Works start(const std::string& name, c10d::OpType type, Tensors results, std::chrono::milliseconds timeout,
              const std::function<void(mpi::Operation&)>& issue);
  Works receive(Tensors& tensors, int from, int tag, const std::string& name, c10d::OpType type);
  void reduce_into(mpi::Operation& operation, const at::Tensor& tensor, const c10d::ReduceOp& op, int root);
  void gather_equal(mpi::Operation& operation, const at::Tensor& output, at::Tensor input);
  void scatter_equal(mpi::Operation& operation, const at::Tensor& output, at::Tensor input,
                     const c10d::ReduceOp& op);
  void exchange(mpi::Operation& operation, const at::Tensor& output, const at::Tensor& input,
                const Sizes& output_counts, const Sizes& input_counts);
  // These throw ConfigError.
  void check(const at::Tensor& tensor, const std::string& where) const;
  void check_root(std::int64_t root, const std::string& where) const;
  void check_same(std::size_t found, std::size_t expected, const std::string& what,
                  const std::string& where) const;
  const at::Tensor& only(const Tensors& tensors, const std::string& where) const;
  Sizes elements(const at::Tensor& tensor, const Sizes& splits, const std::string& where) const;
  int count(std::int64_t elements, const std::string& where) const;
  // The counts and displacements of consecutive parts. The operation keeps them until it is complete.
  std::pair<const int*, const int*> parts(mpi::Operation& operation, const Sizes& counts) const;
  // Calls `issue(first element, count)` for pieces of at most most_elements, once also for an empty tensor.
  void pieces(std::int64_t elements, const std::function<void(std::int64_t, int)>& issue) const;

  std::shared_ptr<mpi::Channel> channel_;
  std::int64_t most_elements_;
};

namespace mpi {
namespace {

// Completes the requests, or throws PeerError at the timeout. Incomplete requests stay alive.
void complete(std::vector<MPI_Request>& requests, const std::string& where,
              std::chrono::milliseconds timeout) {
  const auto done = [&] {
    const CallScope scope;
    int flag = 0;
    check(MPI_Testall(static_cast<int>(requests.size()), requests.data(), &flag, MPI_STATUSES_IGNORE), where);
    return flag != 0;
  };
  if (poll_until(done, timeout)) return;
  abandon();
  throw PeerError({.where = where,
                   .found = fmt::format("not all of its ranks within {} ms", timeout.count()),
                   .expected = "all of them to make it",
                   .action = "See which rank does not come, or raise parallel.timeout_seconds"});
}

// MPI_Comm_create_group waits without a timeout, so it is called after all members have arrived.
void meet(const std::vector<int>& ranks, std::uint64_t mark, int tag, const std::string& where,
          std::chrono::milliseconds timeout) {
  int self = 0;
  MPI_Comm_rank(control(), &self);
  struct Marks {
    std::uint64_t own;
    std::vector<std::uint64_t> got;
  };
  // Incomplete requests keep using this memory.
  auto* marks = new Marks{mark, std::vector<std::uint64_t>(ranks.size(), mark)};
  std::vector<MPI_Request> requests;
  const auto receive = [&](std::size_t from) {
    requests.emplace_back();
    const CallScope scope;
    check(MPI_Irecv(&marks->got[from], 1, MPI_UINT64_T, ranks[from], tag, control(), &requests.back()),
          where);
  };
  const auto send = [&](std::size_t to) {
    requests.emplace_back();
    const CallScope scope;
    check(MPI_Isend(&marks->own, 1, MPI_UINT64_T, ranks[to], tag, control(), &requests.back()), where);
  };
  if (self == ranks[0]) {
    for (std::size_t i = 1; i < ranks.size(); ++i) receive(i);
    complete(requests, where, timeout);
    requests.clear();
    for (std::size_t i = 1; i < ranks.size(); ++i) send(i);
  } else {
    send(0);
    receive(0);
  }
  complete(requests, where, timeout);
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (marks->got[i] == mark) continue;
    throw PeerError({.where = where,
                     .found = fmt::format("rank {} makes another group now", ranks[i]),
                     .expected = "the same ranks and name on all members, in the same order",
                     .action = "Make groups in one order on all ranks"});
  }
  delete marks;
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_world(const std::string& name, std::chrono::milliseconds timeout,
                                             std::int64_t most_elements) {
  start(timeout);
  auto* copy = new MPI_Comm(MPI_COMM_NULL);  // MPI writes to it until the request is complete
  std::vector<MPI_Request> requests(1);
  const std::string where = fmt::format("making group '{}' (mpi)", name);
  {
    const CallScope scope;
    check(MPI_Comm_idup(control(), copy, requests.data()), where);
  }
  complete(requests, where, std::max<std::chrono::milliseconds>(timeout, kLeastStart));
  auto backend = c10::make_intrusive<MpiBackend>(*copy, name, timeout, most_elements);
  delete copy;
  return backend;
}

c10::intrusive_ptr<c10d::Backend> make_subgroup(const std::vector<int>& ranks, const std::string& name,
                                                const std::string& key, std::chrono::milliseconds timeout) {
  constexpr std::uint64_t kLeastTagBound = 32767;  // every MPI supports tags up to here
  const std::string where = fmt::format("making group '{}' (mpi)", name);
  const std::uint64_t mark = std::hash<std::string>{}(key);
  const int tag = static_cast<int>(mark % kLeastTagBound);
  meet(ranks, mark, tag, where, timeout);
  MPI_Group all = MPI_GROUP_NULL, members = MPI_GROUP_NULL;
  MPI_Comm comm = MPI_COMM_NULL;
  const CallScope scope;
  check(MPI_Comm_group(control(), &all), where);
  check(MPI_Group_incl(all, static_cast<int>(ranks.size()), ranks.data(), &members), where);
  const int code = MPI_Comm_create_group(control(), members, tag, &comm);
  MPI_Group_free(&members);
  MPI_Group_free(&all);
  check(code, where);
  return c10::make_intrusive<MpiBackend>(comm, name, timeout);
}

}  // namespace mpi

MpiBackend::MpiBackend(MPI_Comm comm, std::string name, std::chrono::milliseconds timeout,
                       std::int64_t most_elements)
    : c10d::Backend(
          [&] {
            int rank = 0;
            MPI_Comm_rank(comm, &rank);
            return rank;
          }(),
          [&] {
            int size = 1;
            MPI_Comm_size(comm, &size);
            return size;
          }()),
      channel_(std::make_shared<mpi::Channel>(comm, std::move(name), timeout)),
      most_elements_(most_elements) {}

void MpiBackend::abort() {
  channel_->poison("this rank has given the group up");
}

MpiBackend::Works MpiBackend::start(const std::string& name, c10d::OpType type, Tensors results,
                                    std::chrono::milliseconds timeout,
                                    const std::function<void(mpi::Operation&)>& issue) {
  auto operation = channel_->start(name, issue);
  operation->used.insert(operation->used.end(), results.begin(), results.end());
  return c10::make_intrusive<mpi::MpiWork>(channel_, std::move(operation), type, std::move(results),
                                           timeout == c10d::kUnsetTimeout ? channel_->timeout() : timeout);
}

void MpiBackend::check(const at::Tensor& tensor, const std::string& where) const {
  std::string found;
  if (!tensor.defined()) {
    found = "an undefined tensor";
  } else if (!tensor.device().is_cpu()) {
    found = "a tensor on " + tensor.device().str();
  } else if (tensor.layout() != at::kStrided || !tensor.is_contiguous()) {
    found = "a tensor that is not contiguous";
  }
  if (found.empty()) return;
  refuse(where, found, "a contiguous tensor on the CPU",
         "Call contiguous() or cpu() first, or give the group a backend of that device");
}

void MpiBackend::check_root(std::int64_t root, const std::string& where) const {
  if (root >= 0 && root < size_) return;
  refuse(where, fmt::format("rank {}", root), fmt::format("0 to {}", size_ - 1), "Name a rank of the group");
}

void MpiBackend::check_same(std::size_t found, std::size_t expected, const std::string& what,
                            const std::string& where) const {
  if (found == expected) return;
  refuse(where, fmt::format("{} {}", found, what), fmt::format("{}", expected),
         "Give tensors whose sizes fit the group and one another");
}

const at::Tensor& MpiBackend::only(const Tensors& tensors, const std::string& where) const {
  check_same(tensors.size(), 1, "tensors", where);
  check(tensors[0], where);
  return tensors[0];
}

int MpiBackend::count(std::int64_t elements, const std::string& where) const {
  if (elements <= most_elements_) return static_cast<int>(elements);
  refuse(where, fmt::format("{} elements", elements),
         fmt::format("at most {} in one call of MPI", most_elements_), "Call it for parts of the tensor");
}

std::pair<const int*, const int*> MpiBackend::parts(mpi::Operation& operation, const Sizes& counts) const {
  std::vector<int>& numbers = operation.counts.emplace_back();
  std::vector<int>& begins = operation.counts.emplace_back();
  std::int64_t total = 0;
  for (const std::int64_t part : counts) {
    begins.push_back(count(total, operation.where));
    numbers.push_back(count(part, operation.where));
    total += part;
  }
  return {numbers.data(), begins.data()};
}

void MpiBackend::pieces(std::int64_t elements, const std::function<void(std::int64_t, int)>& issue) const {
  std::int64_t begin = 0;
  do {
    const std::int64_t piece = std::min(elements - begin, most_elements_);
    issue(begin, static_cast<int>(piece));
    begin += piece;
  } while (begin < elements);
}

// root < 0: the result goes to all ranks.
void MpiBackend::reduce_into(mpi::Operation& operation, const at::Tensor& tensor, const c10d::ReduceOp& op,
                             int root) {
  check(tensor, operation.where);
  const Operand form = mpi::operand(tensor, op, operation.where);
  operation.used.push_back(form.tensor);
  const bool receives = root < 0 || root == rank_;
  pieces(form.tensor.numel(), [&](std::int64_t begin, int count) {
    void* data = mpi::at_element(form.tensor, begin);
    const int code = root < 0
                         ? MPI_Iallreduce(MPI_IN_PLACE, data, count, form.type, form.operation,
                                          channel_->comm(), operation.next())
                         : MPI_Ireduce(receives ? MPI_IN_PLACE : data, receives ? data : nullptr, count,
                                       form.type, form.operation, root, channel_->comm(), operation.next());
    mpi::check(code, operation.where);
  });
  if (!receives) return;
  auto before = std::move(operation.finish);
  operation.finish = [form, tensor, before, size = size_](const mpi::Operation& done) {
    if (before) before(done);
    mpi::deliver(form, form.tensor, tensor, size);
  };
}

MpiBackend::Works MpiBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return start("all_reduce", OpType::ALLREDUCE, tensors, options.timeout, [&](mpi::Operation& operation) {
    reduce_into(operation, only(tensors, operation.where), options.reduceOp, -1);
  });
}

MpiBackend::Works MpiBackend::allreduce_coalesced(Tensors& tensors,
                                                  const c10d::AllreduceCoalescedOptions& options) {
  return start("all_reduce_coalesced", OpType::ALLREDUCE_COALESCED, tensors, options.timeout,
               [&](mpi::Operation& operation) {
                 for (const at::Tensor& tensor : tensors)
                   reduce_into(operation, tensor, options.reduceOp, -1);
               });
}

MpiBackend::Works MpiBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return start("reduce", OpType::REDUCE, tensors, options.timeout, [&](mpi::Operation& operation) {
    check_root(options.rootRank, operation.where);
    reduce_into(operation, only(tensors, operation.where), options.reduceOp,
                static_cast<int>(options.rootRank));
  });
}

MpiBackend::Works MpiBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return start("broadcast", OpType::BROADCAST, tensors, options.timeout, [&](mpi::Operation& operation) {
    const at::Tensor& tensor = only(tensors, operation.where);
    check_root(options.rootRank, operation.where);
    pieces(tensor.numel(), [&](std::int64_t begin, int count) {
      mpi::check(MPI_Ibcast(mpi::at_element(tensor, begin), count, copied_type(tensor, operation.where),
                            static_cast<int>(options.rootRank), channel_->comm(), operation.next()),
                 operation.where);
    });
  });
}

MpiBackend::Works MpiBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                        const c10d::AllgatherOptions& options) {
  return allgather_coalesced(outputs, inputs, options);
}

MpiBackend::Works MpiBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                  const c10d::AllgatherOptions& options) {
  Tensors results;
  for (const Tensors& list : outputs) results.insert(results.end(), list.begin(), list.end());
  return start("all_gather", OpType::ALLGATHER, results, options.timeout, [&](mpi::Operation& operation) {
    check_same(outputs.size(), inputs.size(), "lists of outputs", operation.where);
    std::vector<at::Tensor> flats;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const at::Tensor& input = inputs[i];
      check(input, operation.where);
      check_same(outputs[i].size(), static_cast<std::size_t>(size_), "outputs", operation.where);
      const at::Tensor& own = outputs[i][static_cast<std::size_t>(rank_)];
      check_same(static_cast<std::size_t>(own.numel()), static_cast<std::size_t>(input.numel()),
                 "elements in the output of this rank's input", operation.where);
      at::Tensor flat = mpi::place_for(outputs[i]);
      const auto [counts, begins] = parts(operation, mpi::sizes_of(outputs[i]));
      mpi::check(MPI_Iallgatherv(data_of(input), count(input.numel(), operation.where),
                                 copied_type(input, operation.where), data_of(flat), counts, begins,
                                 copied_type(flat, operation.where), channel_->comm(), operation.next()),
                 operation.where);
      operation.used.push_back(input);
      flats.push_back(flat);
    }
    operation.finish = [flats, lists = outputs](const mpi::Operation&) {
      for (std::size_t i = 0; i < flats.size(); ++i) mpi::distribute(flats[i], lists[i]);
    };
  });
}

void MpiBackend::gather_equal(mpi::Operation& operation, const at::Tensor& output, at::Tensor input) {
  check(input, operation.where);
  check(output, operation.where);
  check_same(static_cast<std::size_t>(output.nbytes()),
             static_cast<std::size_t>(input.nbytes()) * static_cast<std::size_t>(size_), "bytes of output",
             operation.where);
  const auto* place =
      static_cast<const std::byte*>(output.data_ptr()) + static_cast<std::ptrdiff_t>(input.nbytes()) * rank_;
  const bool in_place = input.data_ptr() == place;
  if (!in_place && mpi::overlap(output, input)) input = input.detach().clone();
  operation.used.push_back(input);
  const int each = count(input.numel(), operation.where);
  const MPI_Datatype type = copied_type(input, operation.where);
  mpi::check(MPI_Iallgather(in_place ? MPI_IN_PLACE : data_of(input), each, type, data_of(output), each, type,
                            channel_->comm(), operation.next()),
             operation.where);
}

MpiBackend::Works MpiBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                              const c10d::AllgatherOptions& options) {
  return start("all_gather", OpType::_ALLGATHER_BASE, {output}, options.timeout,
               [&](mpi::Operation& operation) { gather_equal(operation, output, input); });
}

MpiBackend::Works MpiBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                              const c10d::AllgatherOptions& options) {
  return start("all_gather_coalesced", OpType::COALESCED, outputs, options.timeout,
               [&](mpi::Operation& operation) {
                 check_same(outputs.size(), inputs.size(), "outputs", operation.where);
                 for (std::size_t i = 0; i < inputs.size(); ++i)
                   gather_equal(operation, outputs[i], inputs[i]);
               });
}

MpiBackend::Works MpiBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                     const c10d::GatherOptions& options) {
  const Tensors results = outputs.empty() ? Tensors{} : outputs[0];
  return start("gather", OpType::GATHER, results, options.timeout, [&](mpi::Operation& operation) {
    const at::Tensor& input = only(inputs, operation.where);
    check_root(options.rootRank, operation.where);
    const int root = static_cast<int>(options.rootRank);
    const MPI_Datatype type = copied_type(input, operation.where);
    operation.used.push_back(input);
    std::pair<const int*, const int*> places{nullptr, nullptr};
    at::Tensor flat;
    if (root == rank_) {
      check_same(results.size(), static_cast<std::size_t>(size_), "outputs", operation.where);
      flat = mpi::place_for(results);
      places = parts(operation, mpi::sizes_of(results));
      operation.finish = [flat, results](const mpi::Operation&) { mpi::distribute(flat, results); };
    }
    mpi::check(MPI_Igatherv(data_of(input), count(input.numel(), operation.where), type,
                            flat.defined() ? data_of(flat) : nullptr, places.first, places.second, type, root,
                            channel_->comm(), operation.next()),
               operation.where);
  });
}

MpiBackend::Works MpiBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                      const c10d::ScatterOptions& options) {
  return start("scatter", OpType::SCATTER, outputs, options.timeout, [&](mpi::Operation& operation) {
    const at::Tensor& output = only(outputs, operation.where);
    check_root(options.rootRank, operation.where);
    const int root = static_cast<int>(options.rootRank);
    const MPI_Datatype type = copied_type(output, operation.where);
    std::pair<const int*, const int*> places{nullptr, nullptr};
    at::Tensor flat;
    if (root == rank_) {
      check_same(inputs.size(), 1, "lists of inputs", operation.where);
      check_same(inputs[0].size(), static_cast<std::size_t>(size_), "inputs", operation.where);
      flat = mpi::joined(inputs[0]);
      operation.used.push_back(flat);
      places = parts(operation, mpi::sizes_of(inputs[0]));
    }
    mpi::check(MPI_Iscatterv(flat.defined() ? data_of(flat) : nullptr, places.first, places.second, type,
                             data_of(output), count(output.numel(), operation.where), type, root,
                             channel_->comm(), operation.next()),
               operation.where);
  });
}

MpiBackend::Works MpiBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                             const c10d::ReduceScatterOptions& options) {
  return start(
      "reduce_scatter", OpType::REDUCE_SCATTER, outputs, options.timeout, [&](mpi::Operation& operation) {
        const at::Tensor& output = only(outputs, operation.where);
        check_same(inputs.size(), 1, "lists of inputs", operation.where);
        check_same(inputs[0].size(), static_cast<std::size_t>(size_), "inputs", operation.where);
        const auto own = static_cast<std::size_t>(inputs[0][static_cast<std::size_t>(rank_)].numel());
        check_same(static_cast<std::size_t>(output.numel()), own, "elements of output", operation.where);
        const Operand form = mpi::operand(mpi::joined(inputs[0]), options.reduceOp, operation.where);
        const at::Tensor combined = at::empty({output.numel()}, form.tensor.options());
        operation.used.push_back(form.tensor);
        const auto [counts, begins] = parts(operation, mpi::sizes_of(inputs[0]));
        mpi::check(MPI_Ireduce_scatter(data_of(form.tensor), data_of(combined), counts, form.type,
                                       form.operation, channel_->comm(), operation.next()),
                   operation.where);
        operation.finish = [form, combined, output, size = size_](const mpi::Operation&) {
          mpi::deliver(form, combined, output, size);
        };
      });
}

void MpiBackend::scatter_equal(mpi::Operation& operation, const at::Tensor& output, at::Tensor input,
                               const c10d::ReduceOp& op) {
  check(input, operation.where);
  check(output, operation.where);
  check_same(static_cast<std::size_t>(input.nbytes()),
             static_cast<std::size_t>(output.nbytes()) * static_cast<std::size_t>(size_), "bytes of input",
             operation.where);
  const Operand form = mpi::operand(input, op, operation.where);
  // PyTorch may pass a part of the input as output.
  const bool direct = form.tensor.scalar_type() == output.scalar_type() && !mpi::overlap(output, form.tensor);
  const at::Tensor combined =
      direct ? output : at::empty({output.numel()}, form.tensor.options().requires_grad(false));
  operation.used.push_back(form.tensor);
  mpi::check(MPI_Ireduce_scatter_block(data_of(form.tensor), data_of(combined),
                                       count(output.numel(), operation.where), form.type, form.operation,
                                       channel_->comm(), operation.next()),
             operation.where);
  auto before = std::move(operation.finish);
  operation.finish = [form, combined, output, before, size = size_](const mpi::Operation& done) {
    if (before) before(done);
    mpi::deliver(form, combined, output, size);
  };
}

MpiBackend::Works MpiBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                   const c10d::ReduceScatterOptions& options) {
  return start("reduce_scatter", OpType::_REDUCE_SCATTER_BASE, {output}, options.timeout,
               [&](mpi::Operation& operation) { scatter_equal(operation, output, input, options.reduceOp); });
}

MpiBackend::Works MpiBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                              const c10d::ReduceScatterOptions& options) {
  return start("reduce_scatter_coalesced", torch_versions::kReduceScatterCoalesced, outputs, options.timeout,
               [&](mpi::Operation& operation) {
                 check_same(outputs.size(), inputs.size(), "outputs", operation.where);
                 for (std::size_t i = 0; i < inputs.size(); ++i)
                   scatter_equal(operation, outputs[i], inputs[i], options.reduceOp);
               });
}

void MpiBackend::exchange(mpi::Operation& operation, const at::Tensor& output, const at::Tensor& input,
                          const Sizes& output_counts, const Sizes& input_counts) {
  operation.used.push_back(input);
  operation.used.push_back(output);
  const auto [sent, sent_begins] = parts(operation, input_counts);
  const auto [received, received_begins] = parts(operation, output_counts);
  const MPI_Datatype type = copied_type(input, operation.where);
  mpi::check(MPI_Ialltoallv(data_of(input), sent, sent_begins, type, data_of(output), received,
                            received_begins, type, channel_->comm(), operation.next()),
             operation.where);
}

// The elements for or from each rank: `splits` rows each, or equal parts.
MpiBackend::Sizes MpiBackend::elements(const at::Tensor& tensor, const Sizes& splits,
                                       const std::string& where) const {
  const std::int64_t rows = tensor.dim() > 0 ? tensor.size(0) : 1, ranks = size_;
  Sizes counts = splits;
  if (counts.empty()) {
    const Sizes equal(static_cast<std::size_t>(ranks), rows / ranks);
    check_same(static_cast<std::size_t>(rows % ranks), 0, "rows beyond equal parts", where);
    counts = equal;
  }
  check_same(counts.size(), static_cast<std::size_t>(ranks), "splits", where);
  check_same(static_cast<std::size_t>(std::accumulate(counts.begin(), counts.end(), std::int64_t{0})),
             static_cast<std::size_t>(rows), "rows in all splits", where);
  const std::int64_t width = tensor.dim() > 0 ? c10::multiply_integers(tensor.sizes().slice(1)) : 1;
  for (std::int64_t& part : counts) part *= width;
  return counts;
}

MpiBackend::Works MpiBackend::alltoall_base(at::Tensor& output, at::Tensor& input, Sizes& output_splits,
                                            Sizes& input_splits, const c10d::AllToAllOptions& options) {
  return start("all_to_all", OpType::ALLTOALL_BASE, {output}, options.timeout,
               [&](mpi::Operation& operation) {
                 check(output, operation.where);
                 check(input, operation.where);
                 check_same(output.element_size(), input.element_size(), "bytes in an element of output",
                            operation.where);
                 exchange(operation, output, mpi::overlap(output, input) ? input.detach().clone() : input,
                          elements(output, output_splits, operation.where),
                          elements(input, input_splits, operation.where));
               });
}

MpiBackend::Works MpiBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                       const c10d::AllToAllOptions& options) {
  return start("all_to_all", OpType::ALLTOALL, outputs, options.timeout, [&](mpi::Operation& operation) {
    check_same(outputs.size(), static_cast<std::size_t>(size_), "outputs", operation.where);
    check_same(inputs.size(), static_cast<std::size_t>(size_), "inputs", operation.where);
    const at::Tensor flat = mpi::place_for(outputs);
    exchange(operation, flat, mpi::joined(inputs), mpi::sizes_of(outputs), mpi::sizes_of(inputs));
    operation.finish = [flat, outputs](const mpi::Operation&) { mpi::distribute(flat, outputs); };
  });
}

MpiBackend::Works MpiBackend::send(Tensors& tensors, int to, int tag) {
  return start(fmt::format("send to rank {}", to), OpType::SEND, tensors, c10d::kUnsetTimeout,
               [&](mpi::Operation& operation) {
                 const at::Tensor& tensor = only(tensors, operation.where);
                 check_root(to, operation.where);
                 pieces(tensor.numel(), [&](std::int64_t begin, int count) {
                   mpi::check(
                       MPI_Isend(mpi::at_element(tensor, begin), count, copied_type(tensor, operation.where),
                                 to, tag, channel_->comm(), operation.next()),
                       operation.where);
                 });
               });
}

MpiBackend::Works MpiBackend::receive(Tensors& tensors, int from, int tag, const std::string& name,
                                      c10d::OpType type) {
  return start(name, type, tensors, c10d::kUnsetTimeout, [&](mpi::Operation& operation) {
    const at::Tensor& tensor = only(tensors, operation.where);
    const MPI_Datatype element = copied_type(tensor, operation.where);
    pieces(tensor.numel(), [&](std::int64_t begin, int count) {
      mpi::check(MPI_Irecv(mpi::at_element(tensor, begin), count, element, from, tag, channel_->comm(),
                           operation.next()),
                 operation.where);
    });
    operation.finish = [element, expected = tensor.numel()](const mpi::Operation& done) {
      std::int64_t total = 0;
      for (const MPI_Status& status : done.statuses) {
        int count = 0;
        MPI_Get_count(&status, element, &count);
        total += count;
      }
      if (total == expected) return;
      throw PeerError({.where = done.where,
                       .found = fmt::format("a message of {} elements", total),
                       .expected = fmt::format("{}", expected),
                       .action = "Send and receive tensors of one size and type"});
    };
  });
}

MpiBackend::Works MpiBackend::recv(Tensors& tensors, int from, int tag) {
  const std::string name = fmt::format("recv from rank {}", from);
  check_root(from, name);
  return receive(tensors, from, tag, name, OpType::RECV);
}

MpiBackend::Works MpiBackend::recvAnysource(Tensors& tensors, int tag) {
  if (tensors.size() == 1 && tensors[0].numel() > most_elements_) {
    // A split message could come from different ranks, so it is refused.
    count(tensors[0].numel(), "recv from any rank");
  }
  return receive(tensors, MPI_ANY_SOURCE, tag, "recv from any rank", OpType::RECVANYSOURCE);
}

MpiBackend::Works MpiBackend::barrier(const c10d::BarrierOptions& options) {
  return start("barrier", OpType::BARRIER, {}, options.timeout, [&](mpi::Operation& operation) {
    mpi::check(MPI_Ibarrier(channel_->comm(), operation.next()), operation.where);
  });
}

}  // namespace isograd
