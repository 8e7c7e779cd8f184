// The process's MPI, and MpiBackend: c10d's operations through a few of MPI's non-blocking calls. Sums are
// MPI_Iallreduce or MPI_Ireduce_scatter, copies MPI_Ibcast, MPI_Iallgather or MPI_Ialltoallv. The other
// operations are made of these.
#include "comm/mpi/mpi.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <mpi.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>

#include "base/print.hpp"
#include "base/refuse.hpp"
#include "base/torch_versions.hpp"
#include "comm/call.hpp"
#include "comm/environment.hpp"
#include "comm/queue.hpp"
#include "isograd/error.hpp"

namespace isograd::mpi {
namespace {

// The least time for start(): MPI connects all ranks then, however short the groups' timeouts are.
constexpr std::chrono::seconds kLeastStart{30};
// A finished rank waits for ranks that still write reports. mpirun ends it if one fails.
constexpr std::chrono::milliseconds kLeastFinish = std::chrono::minutes(5);

// MPI_Init and MPI_Finalize wait for all ranks without a timeout and must run in the same thread. This thread
// is kept for them, so that callers can wait with a timeout. It is never destroyed, because it may outlive
// static objects.
struct Keeper {
  std::mutex mutex;
  std::condition_variable changed;
  enum class Phase { kNotStarted, kStarting, kRunning, kFinalizing, kFinalized } phase = Phase::kNotStarted;
  int code = MPI_SUCCESS;
  int level = MPI_THREAD_SINGLE;
  bool ours = false;                 // this library initialised MPI, so it finalises it
  MPI_Comm control = MPI_COMM_NULL;  // of all ranks, for the agreements of groups outside their collectives
  std::chrono::milliseconds timeout{};
  std::atomic<bool> running{false};  // false: MPI calls are not allowed yet, or any more
  std::atomic<bool> serial{true};
  // An operation is incomplete for good. MPI_Finalize would wait for it, so the process ends without that
  // call. mpirun then ends the other ranks and returns a non-zero status.
  std::atomic<bool> abandoned{false};
  std::mutex calls;

  void run() {
    int provided = MPI_THREAD_SINGLE;
    int result = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided);
    MPI_Comm copy = MPI_COMM_NULL;
    if (result == MPI_SUCCESS) result = MPI_Comm_dup(MPI_COMM_WORLD, &copy);
    std::unique_lock lock(mutex);
    settle(result, provided, copy);
    changed.wait(lock, [this] { return phase == Phase::kFinalizing; });
    lock.unlock();
    MPI_Comm_free(&copy);
    MPI_Finalize();
    lock.lock();
    phase = Phase::kFinalized;
    changed.notify_all();
  }

  void settle(int result, int provided, MPI_Comm copy) {  // REQUIRES: mutex held
    code = result;
    level = provided;
    control = copy;
    if (result == MPI_SUCCESS) MPI_Comm_set_errhandler(copy, MPI_ERRORS_RETURN);
    serial = provided < MPI_THREAD_MULTIPLE;
    running = result == MPI_SUCCESS;
    phase = Phase::kRunning;
    changed.notify_all();
  }
};

Keeper& keeper() {
  static Keeper* kept = new Keeper;
  return *kept;
}

// A failed rank exits without MPI_Finalize, because that would wait for ranks that wait for this one.
void finalize_at_exit(int status, void*) {
  Keeper& kept = keeper();
  std::unique_lock lock(kept.mutex);
  if (kept.phase != Keeper::Phase::kRunning || !kept.ours) return;
  kept.running = false;
  if (status != 0 || kept.abandoned) return;
  kept.phase = Keeper::Phase::kFinalizing;
  kept.changed.notify_all();
  if (kept.changed.wait_for(lock, kept.timeout, [&] { return kept.phase == Keeper::Phase::kFinalized; }))
    return;
  print(stderr, fmt::format("isograd: the other ranks did not reach MPI_Finalize within {} ms\n",
                            kept.timeout.count()));
  std::_Exit(kStatusPeerLost);
}

// Serialises calls for an MPI without MPI_THREAD_MULTIPLE. Never held while waiting.
class CallScope {
 public:
  CallScope() {
    if (keeper().serial) lock_ = std::unique_lock(keeper().calls);
  }

 private:
  std::unique_lock<std::mutex> lock_;
};

// PeerError with MPI's error text unless `code` is MPI_SUCCESS.
void check(int code, const std::string& where) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw PeerError(
      {.where = where,
       .found = "MPI says: " + std::string(text, static_cast<std::size_t>(length)),
       .expected = "a completed operation",
       .action = "See whether all ranks call the same operation with the same sizes, and still run"});
}

using c10d::OpType;
using queue::Works;
using shm::Region;
using Sizes = std::vector<std::int64_t>;

struct Communicator {
  explicit Communicator(MPI_Comm comm) : comm(comm) {}
  ~Communicator() {
    if (failed || !keeper().running) return;  // freeing might wait for pending requests
    const CallScope scope;
    MPI_Comm_free(&comm);
  }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  MPI_Comm comm;
  bool failed = false;
};

// The requests of one call.
class Requests final : public c10d::Work {
 public:
  Requests(std::shared_ptr<Communicator> communicator, std::string where, OpType type, Tensors results)
      : c10d::Work(-1, type), where(std::move(where)), results_(std::move(results)) {
    kept_->communicator = std::move(communicator);
    keep(results_);
  }
  ~Requests() override {
    try {
      if (requests_.empty() || !keeper().running || isCompleted()) return;
    } catch (...) {  // the requests are abandoned
    }
    keeper().abandoned = true;
    (void)kept_.release();  // MPI may still write to this memory, so it is never freed
  }

  // `issue` makes one request of MPI.
  void add(const std::function<int(MPI_Comm, MPI_Request*)>& issue) {
    check(issue(kept_->communicator->comm, &requests_.emplace_back(MPI_REQUEST_NULL)), where);
  }
  void keep(const Tensors& tensors) {
    kept_->tensors.insert(kept_->tensors.end(), tensors.begin(), tensors.end());
  }
  const int* keep(std::vector<int> numbers) { return kept_->numbers.emplace_back(std::move(numbers)).data(); }

  bool isCompleted() override {
    if (complete_) return true;
    {
      const CallScope scope;
      statuses.resize(requests_.size());
      int flag = 0;
      int code = MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &flag, statuses.data());
      if (code == MPI_ERR_IN_STATUS)
        for (const MPI_Status& status : statuses)
          if (status.MPI_ERROR != MPI_SUCCESS && status.MPI_ERROR != MPI_ERR_PENDING) code = status.MPI_ERROR;
      check(code, where);
      if (!flag) return false;
    }
    for (const auto& action : finish) action();
    finish.clear();
    kept_->tensors.clear();
    return complete_ = true;
  }
  bool wait(std::chrono::milliseconds) override { return true; }  // the queue polls
  Tensors result() override { return results_; }
  int sourceRank() const override {
    return complete_ && !statuses.empty() ? statuses.front().MPI_SOURCE : -1;
  }

  const std::string where;
  std::vector<MPI_Status> statuses;
  std::vector<std::function<void()>> finish;  // called once all requests are complete; may throw

 private:
  struct Kept {  // memory that MPI may read or write until the requests are complete
    std::shared_ptr<Communicator> communicator;
    Tensors tensors;
    std::deque<std::vector<int>> numbers;
  };
  std::unique_ptr<Kept> kept_ = std::make_unique<Kept>();
  std::vector<MPI_Request> requests_;
  Tensors results_;
  bool complete_ = false;
};

// A valid pointer for MPI, even for an empty tensor.
void* data_of(const at::Tensor& tensor, std::int64_t element = 0) {
  static std::uint64_t nothing[2] = {};
  if (tensor.numel() == 0) return nothing;
  return static_cast<char*>(tensor.data_ptr()) + element * tensor.element_size();
}

// For copies only the width of the numbers matters.
MPI_Datatype copied_type(const at::Tensor& tensor, const Call& check) {
  switch (tensor.element_size()) {
    case 1: return MPI_UINT8_T;
    case 2: return MPI_UINT16_T;
    case 4: return MPI_UINT32_T;
    case 8: return MPI_UINT64_T;
    case 16: return MPI_C_DOUBLE_COMPLEX;
    default:
      check.refuse(fmt::format("a tensor of {}", c10::toString(tensor.scalar_type())),
                   "elements of 1, 2, 4, 8 or 16 bytes", "Convert the tensor first");
  }
}

// MPI forbids that buffers of one call overlap.
bool overlap(const at::Tensor& a, const at::Tensor& b) {
  const auto *first = static_cast<const char*>(data_of(a)), *second = static_cast<const char*>(data_of(b));
  return a.numel() > 0 && b.numel() > 0 && first < second + b.nbytes() && second < first + a.nbytes();
}

// Lists of tensors as one flat tensor: their sizes, their contents, and the way back.
Sizes sizes_of(const Tensors& tensors) {
  Sizes sizes;
  for (const at::Tensor& tensor : tensors) sizes.push_back(tensor.numel());
  return sizes;
}

at::Tensor joined(const Tensors& tensors) {
  Tensors flat;
  for (const at::Tensor& tensor : tensors) flat.push_back(tensor.reshape({-1}));
  return at::cat(flat);
}

void distribute(const at::Tensor& flat, const Tensors& tensors) {
  const Tensors parts = flat.split_with_sizes(sizes_of(tensors));
  for (std::size_t i = 0; i < parts.size(); ++i) tensors[i].copy_(parts[i].view(tensors[i].sizes()));
}

Sizes counts_of(const std::vector<Region>& parts, const at::Tensor& of) {
  Sizes counts;
  for (const Region& part : parts) counts.push_back(static_cast<std::int64_t>(part.bytes) / of.itemsize());
  return counts;
}

// The tensor to combine: the tensor itself, or a copy for 16-bit numbers (combined in float32, rounded once)
// and for numbers that are multiplied first.
struct Operand {
  at::Tensor tensor;
  MPI_Datatype type;
  MPI_Op operation;
  bool mean;
};

Operand operand(const at::Tensor& tensor, const c10d::ReduceOp& op, const Call& check) {
  using kernels::Combine, kernels::Number;
  const auto [number, combine, factor] = check.reduction(tensor, op);
  const bool wide = number == Number::kBFloat16 || number == Number::kFloat16;
  // In the order of Number and of Combine.
  const MPI_Datatype types[] = {MPI_DOUBLE,  MPI_FLOAT,   MPI_FLOAT,  MPI_FLOAT,   MPI_INT64_T,
                                MPI_INT32_T, MPI_INT16_T, MPI_INT8_T, MPI_UINT8_T, MPI_C_BOOL};
  const MPI_Op sums[] = {MPI_SUM, MPI_MAX, MPI_MIN, MPI_PROD, MPI_SUM, MPI_SUM, MPI_BAND, MPI_BOR, MPI_BXOR};
  const MPI_Op logical[] = {MPI_LOR,     MPI_LOR,  MPI_LAND, MPI_LAND, MPI_OP_NULL,
                            MPI_OP_NULL, MPI_LAND, MPI_LOR,  MPI_LXOR};
  const auto which = static_cast<std::size_t>(combine);
  Operand form{wide ? tensor.to(at::kFloat) : tensor, types[static_cast<std::size_t>(number)],
               number == Number::kBool ? logical[which] : sums[which], combine == Combine::kAverage};
  if (combine == Combine::kScaledSum) form.tensor = form.tensor.mul(factor);
  return form;
}

// Writes the combined numbers to `result`. `combined` may be `result` itself.
void deliver(const Operand& form, const at::Tensor& combined, const at::Tensor& result, int size) {
  if (form.mean && at::isFloatingType(combined.scalar_type())) combined.div_(size);
  if (form.mean && !at::isFloatingType(combined.scalar_type())) combined.div_(size, "trunc");
  if (!combined.is_same(result)) result.copy_(combined.view(result.sizes()));
}

// Tensors are contiguous and on the CPU. Copies: any type. Reductions: those of ShmBackend; 16-bit floats are
// combined in float32 and rounded once. MPI determines the order of summation. Mismatched calls are detected
// only where MPI detects them. MPI advances only while somebody waits or polls.
class MpiBackend final : public c10d::Backend {
 public:
  // Takes ownership of `comm`.
  MpiBackend(MPI_Comm comm, Rank own, std::string name, std::chrono::milliseconds timeout,
             std::int64_t most_elements = kMostElements)
      : c10d::Backend(own.rank, own.size),
        name_(std::move(name)),
        most_elements_(most_elements),
        communicator_(std::make_shared<Communicator>(comm)),
        queue_(std::make_shared<queue::Queue>(queue::Queue::Names{name_, "mpi", rank_, size_}, timeout,
                                              [communicator = communicator_](const std::string&) {
                                                communicator->failed = true;
                                                keeper().abandoned = true;
                                              })) {}

  const std::string getBackendName() const override { return "mpi"; }
  void setTimeout(std::chrono::milliseconds timeout) override { queue_->set_timeout(timeout); }
  // Later calls and waits on this rank throw. Its process then ends without MPI_Finalize, so mpirun ends the
  // other ranks.
  void abort() override { queue_->fail("this rank has given the group up"); }

  using Lists = std::vector<Tensors>;

  // ---- reductions ----
  Works allreduce(Tensors& tensors, const c10d::AllreduceOptions& options = {}) override {
    return start("all_reduce", OpType::ALLREDUCE, tensors, options.timeout,
                 [&](Issued& issued) { all_reduce(issued, issued.check.only(tensors), options.reduceOp); });
  }
  Works allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options = {}) override {
    return start("all_reduce_coalesced", OpType::ALLREDUCE_COALESCED, tensors, options.timeout,
                 [&](Issued& issued) {
                   for (const at::Tensor& tensor : tensors) {  // all checks come before the first request
                     issued.check.piece(tensor);
                     issued.check.reduction(tensor, options.reduceOp);
                   }
                   for (const at::Tensor& tensor : tensors) all_reduce(issued, tensor, options.reduceOp);
                 });
  }
  Works reduce(Tensors& tensors, const c10d::ReduceOptions& options = {}) override {
    return start("reduce", OpType::REDUCE, tensors, options.timeout, [&](Issued& issued) {
      const at::Tensor& tensor = issued.check.only(tensors);
      issued.check.piece(tensor);
      const int root = issued.check.root(options.rootRank);
      const Operand form = operand(tensor, options.reduceOp, issued.check);
      issued.requests.keep({form.tensor});
      in_pieces(issued, form.tensor, [&](void* data, int count, MPI_Comm comm, MPI_Request* request) {
        return rank_ == root
                   ? MPI_Ireduce(MPI_IN_PLACE, data, count, form.type, form.operation, root, comm, request)
                   : MPI_Ireduce(data, nullptr, count, form.type, form.operation, root, comm, request);
      });
      if (rank_ == root)
        issued.requests.finish.push_back(
            [form, tensor, size = size_] { deliver(form, form.tensor, tensor, size); });
    });
  }
  Works reduce_scatter(Tensors& outputs, Lists& inputs,
                       const c10d::ReduceScatterOptions& options = {}) override {
    return start("reduce_scatter", OpType::REDUCE_SCATTER, outputs, options.timeout, [&](Issued& issued) {
      const at::Tensor& output = issued.check.only(outputs);
      const Tensors& parts = issued.check.one_list(inputs);
      issued.check.piece(output);  // MPI may write to it
      issued.check.same_size(output, parts[own()]);
      reduce_scatter_parts(issued, output, joined(parts), sizes_of(parts), options.reduceOp);
    });
  }
  Works _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                             const c10d::ReduceScatterOptions& options = {}) override {
    return start("reduce_scatter", OpType::_REDUCE_SCATTER_BASE, {output}, options.timeout,
                 [&](Issued& issued) { reduce_scatter_even(issued, output, input, options.reduceOp); });
  }
  Works reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                        const c10d::ReduceScatterOptions& options = {}) override {
    return start("reduce_scatter_coalesced", torch_versions::kReduceScatterCoalesced, outputs,
                 options.timeout, [&](Issued& issued) {
                   issued.check.as_many(outputs.size(), inputs.size());
                   for (std::size_t i = 0; i < inputs.size(); ++i) {
                     issued.check.piece(outputs[i]), issued.check.cut(inputs[i], outputs[i]);
                     issued.check.reduction(inputs[i], options.reduceOp);
                   }
                   for (std::size_t i = 0; i < inputs.size(); ++i)
                     reduce_scatter_even(issued, outputs[i], inputs[i], options.reduceOp);
                 });
  }

  // ---- copies ----
  Works broadcast(Tensors& tensors, const c10d::BroadcastOptions& options = {}) override {
    return start("broadcast", OpType::BROADCAST, tensors, options.timeout, [&](Issued& issued) {
      const at::Tensor& tensor = issued.check.only(tensors);
      issued.check.piece(tensor);
      const int root = issued.check.root(options.rootRank);
      const MPI_Datatype type = copied_type(tensor, issued.check);
      in_pieces(issued, tensor, [&](void* data, int count, MPI_Comm comm, MPI_Request* request) {
        return MPI_Ibcast(data, count, type, root, comm, request);
      });
    });
  }
  Works _allgather_base(at::Tensor& output, at::Tensor& input,
                        const c10d::AllgatherOptions& options = {}) override {
    return start("all_gather", OpType::_ALLGATHER_BASE, {output}, options.timeout,
                 [&](Issued& issued) { all_gather_even(issued, output, input); });
  }
  Works allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                        const c10d::AllgatherOptions& options = {}) override {
    return start("all_gather_coalesced", OpType::COALESCED, outputs, options.timeout, [&](Issued& issued) {
      issued.check.as_many(outputs.size(), inputs.size());
      for (std::size_t i = 0; i < inputs.size(); ++i)
        issued.check.piece(inputs[i]), issued.check.cut(outputs[i], inputs[i]);
      for (std::size_t i = 0; i < inputs.size(); ++i) all_gather_even(issued, outputs[i], inputs[i]);
    });
  }
  // The tensors of a list may differ in size.
  Works allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options = {}) override {
    return allgather_coalesced(outputs, inputs, options);
  }
  Works allgather_coalesced(Lists& outputs, Tensors& inputs,
                            const c10d::AllgatherOptions& options = {}) override {
    Tensors results;
    for (const Tensors& list : outputs) results.insert(results.end(), list.begin(), list.end());
    return start("all_gather", OpType::ALLGATHER, results, options.timeout, [&](Issued& issued) {
      issued.check.as_many(outputs.size(), inputs.size());
      for (std::size_t i = 0; i < inputs.size(); ++i) {
        issued.check.piece(inputs[i]);
        issued.check.one_for_each(outputs[i]);
        issued.check.same_size(outputs[i][own()], inputs[i]);
      }
      for (std::size_t i = 0; i < inputs.size(); ++i)  // every rank gets the same elements
        exchange_lists(issued, outputs[i], inputs[i], Sizes(ranks(), inputs[i].numel()), false);
    });
  }
  Works gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options = {}) override {
    const Tensors results = outputs.empty() ? Tensors{} : outputs[0];
    return start("gather", OpType::GATHER, results, options.timeout, [&](Issued& issued) {
      const at::Tensor& input = issued.check.only(inputs);
      issued.check.piece(input);
      const int root = issued.check.root(options.rootRank);
      exchange_lists(issued, rank_ == root ? issued.check.one_list(outputs) : Tensors{}, input,
                     only_of(root, input.numel()));
    });
  }
  Works scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options = {}) override {
    return start("scatter", OpType::SCATTER, outputs, options.timeout, [&](Issued& issued) {
      const at::Tensor& output = issued.check.only(outputs);
      issued.check.piece(output);
      const int root = issued.check.root(options.rootRank);
      const Tensors parts = rank_ == root ? issued.check.one_list(inputs) : Tensors{};
      exchange(issued, output, only_of(root, output.numel()),
               parts.empty() ? at::empty({0}, output.options()) : joined(parts), sizes_of(parts));
    });
  }
  // Splits are numbers of rows (dim 0). Without splits the parts are equal.
  Works alltoall_base(at::Tensor& output, at::Tensor& input, Sizes& output_splits, Sizes& input_splits,
                      const c10d::AllToAllOptions& options = {}) override {
    return start("all_to_all", OpType::ALLTOALL_BASE, {output}, options.timeout, [&](Issued& issued) {
      issued.check.same_type(output, input);
      exchange(issued, output, counts_of(issued.check.cut_rows(output, output_splits), output), input,
               counts_of(issued.check.cut_rows(input, input_splits), input));
    });
  }
  Works alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options = {}) override {
    return start("all_to_all", OpType::ALLTOALL, outputs, options.timeout, [&](Issued& issued) {
      issued.check.one_for_each(outputs), issued.check.one_for_each(inputs);
      exchange_lists(issued, outputs, joined(inputs), sizes_of(inputs));
    });
  }

  // ---- messages and the barrier ----
  Works send(Tensors& tensors, int to, int tag) override {
    return start(fmt::format("send to rank {}", to), OpType::SEND, tensors, c10d::kUnsetTimeout,
                 [&](Issued& issued) {
                   const at::Tensor& tensor = issued.check.only(tensors);
                   issued.check.piece(tensor), issued.check.peer(to);
                   const MPI_Datatype type = copied_type(tensor, issued.check);
                   in_pieces(issued, tensor, [&](void* data, int count, MPI_Comm comm, MPI_Request* request) {
                     return MPI_Isend(data, count, type, to, tag, comm, request);
                   });
                 });
  }
  Works recv(Tensors& tensors, int from, int tag) override {
    return receive(tensors, from, tag, fmt::format("recv from rank {}", from), OpType::RECV);
  }
  Works recvAnysource(Tensors& tensors, int tag) override {
    return receive(tensors, MPI_ANY_SOURCE, tag, "recv from any rank", OpType::RECVANYSOURCE);
  }
  Works barrier(const c10d::BarrierOptions& options = {}) override {
    return start("barrier", OpType::BARRIER, {}, options.timeout,
                 [&](Issued& issued) { issued.requests.add(MPI_Ibarrier); });
  }

 private:
  struct Issued {
    Requests& requests;
    const Call check;
  };

  std::size_t own() const { return static_cast<std::size_t>(rank_); }
  std::size_t ranks() const { return static_cast<std::size_t>(size_); }
  Sizes only_of(int rank, std::int64_t count) const {
    Sizes sizes(ranks(), 0);
    sizes[static_cast<std::size_t>(rank)] = count;
    return sizes;
  }

  Works start(const std::string& name, OpType type, Tensors results, std::chrono::milliseconds timeout,
              const std::function<void(Issued&)>& issue) {
    const at::NoGradGuard no_graph;
    const auto begin = [&](const std::string& where) {
      auto requests = c10::make_intrusive<Requests>(communicator_, where, type, std::move(results));
      Issued issued{*requests, {name, name_, rank_, size_, "mpi"}};
      const CallScope scope;
      issue(issued);
      return requests;
    };
    return queue_->follow(name, begin, timeout);
  }

  int count(std::int64_t elements, const Call& check) const {
    if (elements <= most_elements_) return static_cast<int>(elements);
    check.refuse(fmt::format("{} elements", elements),
                 fmt::format("at most {} in one call of MPI", most_elements_),
                 "Call it for parts of the tensor");
  }

  // Makes a request for each piece of at most most_elements, and one for an empty tensor.
  void in_pieces(Issued& issued, const at::Tensor& tensor,
                 const std::function<int(void*, int, MPI_Comm, MPI_Request*)>& issue) const {
    std::int64_t begin = 0;
    do {
      const std::int64_t piece = std::min(tensor.numel() - begin, most_elements_);
      issued.requests.add([&](MPI_Comm comm, MPI_Request* request) {
        return issue(data_of(tensor, begin), static_cast<int>(piece), comm, request);
      });
      begin += piece;
    } while (begin < tensor.numel());
  }

  void all_reduce(Issued& issued, const at::Tensor& tensor, const c10d::ReduceOp& op) {
    issued.check.piece(tensor);
    const Operand form = operand(tensor, op, issued.check);
    issued.requests.keep({form.tensor});
    in_pieces(issued, form.tensor, [&](void* data, int count, MPI_Comm comm, MPI_Request* request) {
      return MPI_Iallreduce(MPI_IN_PLACE, data, count, form.type, form.operation, comm, request);
    });
    issued.requests.finish.push_back(
        [form, tensor, size = size_] { deliver(form, form.tensor, tensor, size); });
  }

  void reduce_scatter_even(Issued& issued, const at::Tensor& output, const at::Tensor& input,
                           const c10d::ReduceOp& op) {
    issued.check.piece(output);
    reduce_scatter_parts(issued, output, input, counts_of(issued.check.cut(input, output), output), op);
  }
  void reduce_scatter_parts(Issued& issued, const at::Tensor& output, const at::Tensor& input,
                            const Sizes& counts, const c10d::ReduceOp& op) {
    const Operand form = operand(input, op, issued.check);
    // PyTorch may pass a part of the input as output.
    const bool direct = form.tensor.scalar_type() == output.scalar_type() && !overlap(output, form.tensor);
    const at::Tensor combined = direct ? output : at::empty({output.numel()}, form.tensor.options());
    issued.requests.keep({form.tensor, combined});
    const int* numbers =
        parts(issued, counts, /*consecutive=*/false).first;  // MPI takes no displacements here
    issued.requests.add([&](MPI_Comm comm, MPI_Request* request) {
      return MPI_Ireduce_scatter(data_of(form.tensor), data_of(combined), numbers, form.type, form.operation,
                                 comm, request);
    });
    issued.requests.finish.push_back(
        [form, combined, output, size = size_] { deliver(form, combined, output, size); });
  }

  void all_gather_even(Issued& issued, const at::Tensor& output, at::Tensor input) {
    issued.check.piece(input);
    const bool in_place = input.data_ptr() == issued.check.cut(output, input)[own()].data;
    if (!in_place && overlap(output, input)) input = input.clone();
    issued.requests.keep({input});
    const int each = count(input.numel(), issued.check);
    const MPI_Datatype type = copied_type(input, issued.check);
    issued.requests.add([&](MPI_Comm comm, MPI_Request* request) {
      return MPI_Iallgather(in_place ? MPI_IN_PLACE : data_of(input), each, type, data_of(output), each, type,
                            comm, request);
    });
  }

  // The counts and displacements of consecutive parts, or of the same elements for each rank.
  std::pair<const int*, const int*> parts(Issued& issued, const Sizes& counts,
                                          bool consecutive = true) const {
    std::vector<int> numbers(ranks(), 0), begins = numbers;
    std::int64_t total = 0;
    for (std::size_t r = 0; r < counts.size(); ++r) {
      numbers[r] = count(counts[r], issued.check);
      begins[r] = consecutive ? count(total, issued.check) : 0;
      total += counts[r];
    }
    return {issued.requests.keep(std::move(numbers)), issued.requests.keep(std::move(begins))};
  }
  // Sends input_counts[r] elements to rank r. No counts: no elements.
  void exchange(Issued& issued, const at::Tensor& output, const Sizes& output_counts, at::Tensor input,
                const Sizes& input_counts, bool consecutive = true) {
    if (overlap(output, input)) input = input.clone();
    issued.requests.keep({input, output});
    const auto [sent, sent_begins] = parts(issued, input_counts, consecutive);
    const auto [received, received_begins] = parts(issued, output_counts);
    const MPI_Datatype type = copied_type(input, issued.check);
    issued.requests.add([&](MPI_Comm comm, MPI_Request* request) {
      return MPI_Ialltoallv(data_of(input), sent, sent_begins, type, data_of(output), received,
                            received_begins, type, comm, request);
    });
  }
  // As above, into one tensor for each rank, or into none.
  void exchange_lists(Issued& issued, const Tensors& outputs, const at::Tensor& input,
                      const Sizes& input_counts, bool consecutive = true) {
    const Sizes counts = sizes_of(outputs);
    const at::Tensor flat =
        at::empty({std::accumulate(counts.begin(), counts.end(), std::int64_t{0})}, input.options());
    exchange(issued, flat, counts, input, input_counts, consecutive);
    issued.requests.finish.push_back([flat, outputs] { distribute(flat, outputs); });
  }

  Works receive(Tensors& tensors, int from, int tag, const std::string& name, OpType type) {
    return start(name, type, tensors, c10d::kUnsetTimeout, [&](Issued& issued) {
      const at::Tensor& tensor = issued.check.only(tensors);
      issued.check.piece(tensor);
      if (from == MPI_ANY_SOURCE)
        count(tensor.numel(), issued.check);  // pieces could come from different ranks
      else
        issued.check.peer(from);
      const MPI_Datatype element = copied_type(tensor, issued.check);
      in_pieces(issued, tensor, [&](void* data, int count, MPI_Comm comm, MPI_Request* request) {
        return MPI_Irecv(data, count, element, from, tag, comm, request);
      });
      issued.requests.finish.push_back([&requests = issued.requests, element, expected = tensor.numel()] {
        std::int64_t total = 0;
        for (const MPI_Status& status : requests.statuses) {
          int count = 0;
          MPI_Get_count(&status, element, &count);
          total += count;
        }
        if (total == expected) return;
        throw PeerError({.where = requests.where,
                         .found = fmt::format("a message of {} elements", total),
                         .expected = fmt::format("{}", expected),
                         .action = "Send and receive tensors of one size and type"});
      });
    });
  }

  const std::string name_;
  const std::int64_t most_elements_;
  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<queue::Queue> queue_;
};

c10::intrusive_ptr<c10d::Backend> make(MPI_Comm comm, const std::string& name,
                                       std::chrono::milliseconds timeout, std::int64_t most_elements) {
  check(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), name);
  Rank own;
  MPI_Comm_rank(comm, &own.rank);
  MPI_Comm_size(comm, &own.size);
  return c10::make_intrusive<MpiBackend>(comm, own, name, timeout, most_elements);
}

// Completes the requests, or throws PeerError at the timeout. Incomplete requests stay alive.
void complete(std::vector<MPI_Request>& requests, const std::string& where,
              std::chrono::milliseconds timeout) {
  const auto done = [&] {
    const CallScope scope;
    int flag = 0;
    check(MPI_Testall(static_cast<int>(requests.size()), requests.data(), &flag, MPI_STATUSES_IGNORE), where);
    return flag != 0;
  };
  if (queue::poll_until(done, timeout)) return;
  keeper().abandoned = true;
  throw PeerError({.where = where,
                   .found = fmt::format("not all of its ranks within {} ms", timeout.count()),
                   .expected = "all of them to make it",
                   .action = "See which rank does not come, or raise parallel.timeout_seconds"});
}

// MPI_Comm_create_group waits without a timeout, so it is called after all members have arrived: each sends
// its mark to the first one, which then sends its own to each.
void meet(const std::vector<int>& ranks, std::uint64_t mark, int tag, const std::string& where,
          std::chrono::milliseconds timeout) {
  int self = 0;
  MPI_Comm_rank(keeper().control, &self);
  struct Marks {
    std::uint64_t own;
    std::vector<std::uint64_t> got;
  };
  // Incomplete requests keep using this memory.
  auto* marks = new Marks{mark, std::vector<std::uint64_t>(ranks.size(), mark)};
  const auto exchange_with = [&](std::size_t first, std::size_t end, bool receives, bool sends) {
    std::vector<MPI_Request> requests;
    const CallScope scope;
    for (std::size_t i = first; i < end && receives; ++i)
      check(MPI_Irecv(&marks->got[i], 1, MPI_UINT64_T, ranks[i], tag, keeper().control,
                      &requests.emplace_back()),
            where);
    for (std::size_t i = first; i < end && sends; ++i)
      check(
          MPI_Isend(&marks->own, 1, MPI_UINT64_T, ranks[i], tag, keeper().control, &requests.emplace_back()),
          where);
    return requests;
  };
  const auto all = [&](std::vector<MPI_Request> requests) { complete(requests, where, timeout); };
  if (self == ranks[0]) {
    all(exchange_with(1, ranks.size(), true, false));
    all(exchange_with(1, ranks.size(), false, true));
  } else {
    all(exchange_with(0, 1, true, true));
  }
  for (std::size_t i = 0; i < ranks.size(); ++i)
    if (marks->got[i] != mark)
      throw PeerError({.where = where,
                       .found = fmt::format("rank {} makes another group now", ranks[i]),
                       .expected = "the same ranks and name on all members, in the same order",
                       .action = "Make groups in one order on all ranks"});
  delete marks;
}

}  // namespace

bool built() { return true; }

void require() {}

Rank start(std::chrono::milliseconds timeout) {
  timeout = std::max<std::chrono::milliseconds>(timeout, kLeastStart);
  Keeper& kept = keeper();
  std::unique_lock lock(kept.mutex);
  kept.timeout = std::max({kept.timeout, timeout, kLeastFinish});
  if (kept.phase == Keeper::Phase::kNotStarted) {
    int initialized = 0;
    MPI_Initialized(&initialized);
    if (initialized) {  // by the host program, which finalises it
      int provided = MPI_THREAD_SINGLE;
      MPI_Query_thread(&provided);
      MPI_Comm copy = MPI_COMM_NULL;
      const int result = MPI_Comm_dup(MPI_COMM_WORLD, &copy);
      kept.settle(result, provided, copy);
    } else {
      kept.ours = true;
      kept.phase = Keeper::Phase::kStarting;
      std::thread([&kept] { kept.run(); }).detach();
      ::on_exit(finalize_at_exit, nullptr);
    }
  }
  if (!kept.changed.wait_for(lock, timeout, [&] { return kept.phase >= Keeper::Phase::kRunning; })) {
    throw PeerError(
        {.where = "joining through MPI",
         .found = fmt::format("MPI_Init still waits for other ranks after {} ms", timeout.count()),
         .expected = "all ranks to start",
         .action = "See which rank does not start, or raise parallel.timeout_seconds"});
  }
  check(kept.code, "joining through MPI");
  if (kept.ours && kept.level < MPI_THREAD_SERIALIZED)
    refuse("joining through MPI", "an MPI that only the thread which initialised it may call",
           "MPI_THREAD_SERIALIZED or MPI_THREAD_MULTIPLE",
           "Use an MPI that was built with support for threads");
  if (!kept.running)
    refuse("joining through MPI", "MPI that is finalised", "a process that has not begun to exit",
           "Join earlier");
  Rank rank;
  MPI_Comm_rank(kept.control, &rank.rank);
  MPI_Comm_size(kept.control, &rank.size);
  return rank;
}

std::vector<std::string> launcher(int ranks) {
  std::vector<std::string> command = {"mpirun", "-n", std::to_string(ranks)};
#ifdef OPEN_MPI  // others bind nothing and take any number
  command.insert(command.end(), {"-q", "--oversubscribe", "--bind-to", "none"});
#endif
  return command;
}

c10::intrusive_ptr<c10d::Backend> make_world(const std::string& name, std::chrono::milliseconds timeout,
                                             std::int64_t most_elements) {
  start(timeout);
  auto* copy = new MPI_Comm(MPI_COMM_NULL);  // MPI writes to it until the request is complete
  std::vector<MPI_Request> requests(1);
  const std::string where = fmt::format("making group '{}' (mpi)", name);
  {
    const CallScope scope;
    check(MPI_Comm_idup(keeper().control, copy, requests.data()), where);
  }
  complete(requests, where, std::max<std::chrono::milliseconds>(timeout, kLeastStart));
  const CallScope scope;
  auto backend = make(*copy, name, timeout, most_elements);
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
  check(MPI_Comm_group(keeper().control, &all), where);
  check(MPI_Group_incl(all, static_cast<int>(ranks.size()), ranks.data(), &members), where);
  const int code = MPI_Comm_create_group(keeper().control, members, tag, &comm);
  MPI_Group_free(&members);
  MPI_Group_free(&all);
  check(code, where);
  return make(comm, name, timeout, kMostElements);
}

}  // namespace isograd::mpi
