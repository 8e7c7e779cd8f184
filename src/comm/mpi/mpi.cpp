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
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>

#include "base/print.hpp"
#include "base/refuse.hpp"
#include "comm/checked_backend.hpp"
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
  throw_peer_error(where, "MPI says: " + std::string(text, static_cast<std::size_t>(length)),
                   "a completed operation",
                   "See whether all ranks call the same operation with the same sizes, and still run");
}

using c10d::OpType;
using queue::Works;
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

// The requests of one call, and the memory that MPI may read or write until they are complete.
class Requests final : public c10d::Work {
 public:
  Requests(MPI_Comm comm, std::string where, OpType type = OpType::UNKNOWN, Tensors results = {})
      : c10d::Work(-1, type), where(std::move(where)), comm_(comm), results_(std::move(results)) {
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
    check(issue(comm_, &requests_.emplace_back(MPI_REQUEST_NULL)), where);
  }
  template <typename T>
  T& keep(T value) {
    const auto kept = std::make_shared<T>(std::move(value));
    kept_->push_back(kept);
    return *kept;
  }

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
    kept_->clear();
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
  using Kept = std::vector<std::shared_ptr<void>>;
  const MPI_Comm comm_;
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

// Tensors as one: itself, or the contents of several, flat. `like`: the type where there are none.
at::Tensor joined(const Tensors& tensors, const at::Tensor& like) {
  if (tensors.size() == 1) return tensors[0];
  Tensors flat{at::empty({0}, like.options())};
  for (const at::Tensor& tensor : tensors) flat.push_back(tensor.reshape({-1}));
  return at::cat(flat);
}

void distribute(const at::Tensor& flat, const Tensors& tensors) {
  std::int64_t begin = 0;
  for (const at::Tensor& tensor : tensors) {
    tensor.copy_(flat.narrow(0, begin, tensor.numel()).view(tensor.sizes()));
    begin += tensor.numel();
  }
}

// The numbers of elements of the parts.
Sizes counts_of(const Parts& parts) {
  Sizes counts;
  for (const Call::Region& part : parts.by_rank)
    counts.push_back(static_cast<std::int64_t>(part.bytes) / parts.tensors[0].itemsize());
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

Operand operand(const at::Tensor& tensor, const shm::Reduction& reduction) {
  using kernels::Combine, kernels::Number;
  const auto [number, combine, factor] = reduction;
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
class MpiBackend final : public CheckedBackend<std::function<void(Requests&)>> {
  using Step = std::function<void(Requests&)>;

 public:
  // Takes ownership of `comm`.
  MpiBackend(MPI_Comm comm, Rank own, std::string name, std::chrono::milliseconds timeout,
             std::int64_t most_elements = kMostElements)
      : CheckedBackend(own.rank, own.size, std::move(name), "mpi", /*uneven_at_root=*/true),
        most_elements_(most_elements),
        communicator_(std::make_shared<Communicator>(comm)),
        queue_(std::make_shared<queue::Queue>(queue::Queue::Names{name_, "mpi", rank_, size_}, timeout,
                                              [communicator = communicator_](const std::string&) {
                                                communicator->failed = true;
                                                keeper().abandoned = true;
                                              })) {}

  void setTimeout(std::chrono::milliseconds timeout) override { queue_->set_timeout(timeout); }
  // Later calls and waits on this rank throw. Its process then ends without MPI_Finalize, so mpirun ends the
  // other ranks.
  void abort() override { queue_->fail("this rank has given the group up"); }

 private:
  Works run(const Call& call, Steps steps, OpType type, Tensors results, std::chrono::milliseconds timeout,
            int peer = kAnyRank) override {
    const at::NoGradGuard no_graph;
    std::string name(call.operation());
    if (type == OpType::SEND) name += fmt::format(" to rank {}", peer);
    if (type == OpType::RECV) name += fmt::format(" from rank {}", peer);
    if (type == OpType::RECVANYSOURCE) name += " from any rank";
    const auto begin = [&](const std::string& where) {
      auto requests = c10::make_intrusive<Requests>(communicator_->comm, where, type, std::move(results));
      requests->keep(communicator_);
      const CallScope scope;
      for (const Step& step : steps) step(*requests);
      return requests;
    };
    return queue_->follow(name, begin, timeout);
  }

  // ---- reductions ----
  Step make_reduce(const at::Tensor& tensor, const shm::Reduction& reduction, int root) override {
    return [=, this](Requests& requests) {
      const Operand form = operand(tensor, reduction);
      const bool receives = root == kAllRanks || root == rank_;
      in_pieces(requests, form.tensor, [&](void* data, int count, MPI_Comm comm, MPI_Request* request) {
        if (root == kAllRanks)
          return MPI_Iallreduce(MPI_IN_PLACE, data, count, form.type, form.operation, comm, request);
        return MPI_Ireduce(receives ? MPI_IN_PLACE : data, receives ? data : nullptr, count, form.type,
                           form.operation, root, comm, request);
      });
      if (receives)
        requests.finish.push_back([form, tensor, size = size_] { deliver(form, form.tensor, tensor, size); });
    };
  }
  Step make_reduce_scatter(const Call& check, const at::Tensor& output, Parts inputs,
                           const shm::Reduction& reduction) override {
    // MPI takes no displacements here.
    return [=, this, counts = layout(check, counts_of(inputs), false).counts](Requests& requests) {
      const Operand form = operand(joined(inputs.tensors, output), reduction);
      // PyTorch may pass a part of the input as output.
      const bool direct = form.tensor.scalar_type() == output.scalar_type() && !overlap(output, form.tensor);
      const at::Tensor combined = direct ? output : at::empty({output.numel()}, form.tensor.options());
      requests.keep(Tensors{form.tensor, combined});
      const int* kept = requests.keep(counts).data();
      requests.add([&](MPI_Comm comm, MPI_Request* request) {
        return MPI_Ireduce_scatter(data_of(form.tensor), data_of(combined), kept, form.type, form.operation,
                                   comm, request);
      });
      requests.finish.push_back(
          [form, combined, output, size = size_] { deliver(form, combined, output, size); });
    };
  }

  // ---- copies ----
  Step make_broadcast(const Call& check, const at::Tensor& tensor, int root) override {
    return [=, this, type = copied_type(tensor, check)](Requests& requests) {
      in_pieces(requests, tensor, [&](void* data, int count, MPI_Comm comm, MPI_Request* request) {
        return MPI_Ibcast(data, count, type, root, comm, request);
      });
    };
  }
  Step make_gather(const Call& check, const at::Tensor& input, Parts outputs, int root) override {
    if (root != kAllRanks)
      return exchange(check, outputs.tensors, counts_of(outputs), {input}, only_of(root, input.numel()));
    if (outputs.tensors.size() > 1)  // every rank gets the same elements
      return exchange(check, outputs.tensors, counts_of(outputs), {input}, Sizes(ranks(), input.numel()),
                      /*consecutive=*/false);
    const bool in_place = input.data_ptr() == outputs.by_rank[static_cast<std::size_t>(rank_)].data;
    return [=, output = outputs.tensors[0], each = count(input.numel(), check),
            type = copied_type(input, check)](Requests& requests) {
      const at::Tensor from = !in_place && overlap(output, input) ? input.clone() : input;
      requests.keep(from);
      requests.add([&](MPI_Comm comm, MPI_Request* request) {
        return MPI_Iallgather(in_place ? MPI_IN_PLACE : data_of(from), each, type, data_of(output), each,
                              type, comm, request);
      });
    };
  }
  Step make_scatter(const Call& check, const at::Tensor& output, Parts inputs, int root) override {
    return exchange(check, {output}, only_of(root, output.numel()), inputs.tensors, counts_of(inputs));
  }
  Step make_all_to_all(const Call& check, Parts outputs, Parts inputs) override {
    return exchange(check, outputs.tensors, counts_of(outputs), inputs.tensors, counts_of(inputs));
  }

  // ---- messages and the barrier ----
  Step make_send(const Call& check, const at::Tensor& tensor, int to, int tag) override {
    return [=, this, type = copied_type(tensor, check)](Requests& requests) {
      in_pieces(requests, tensor, [&](void* data, int count, MPI_Comm comm, MPI_Request* request) {
        return MPI_Isend(data, count, type, to, tag, comm, request);
      });
    };
  }
  Step make_recv(const Call& check, const at::Tensor& tensor, int from, int tag) override {
    if (from == kAnyRank) count(tensor.numel(), check);  // pieces could come from different ranks
    return [=, this, type = copied_type(tensor, check)](Requests& requests) {
      const int source = from == kAnyRank ? MPI_ANY_SOURCE : from;
      in_pieces(requests, tensor, [&](void* data, int count, MPI_Comm comm, MPI_Request* request) {
        return MPI_Irecv(data, count, type, source, tag, comm, request);
      });
      requests.finish.push_back([&requests, type, expected = tensor.numel()] {
        std::int64_t total = 0;
        for (const MPI_Status& status : requests.statuses) {
          int count = 0;
          MPI_Get_count(&status, type, &count);
          total += count;
        }
        if (total == expected) return;
        throw_peer_error(requests.where, fmt::format("a message of {} elements", total),
                         fmt::format("{}", expected), "Send and receive tensors of one size and type");
      });
    };
  }
  Step make_barrier() override {
    return [](Requests& requests) { requests.add(MPI_Ibarrier); };
  }

  std::size_t ranks() const { return static_cast<std::size_t>(size_); }
  Sizes only_of(int rank, std::int64_t count) const {
    Sizes sizes(ranks(), 0);
    sizes[static_cast<std::size_t>(rank)] = count;
    return sizes;
  }

  int count(std::int64_t elements, const Call& check) const {
    if (elements <= most_elements_) return static_cast<int>(elements);
    check.refuse(fmt::format("{} elements", elements),
                 fmt::format("at most {} in one call of MPI", most_elements_),
                 "Call it for parts of the tensor");
  }

  // Makes a request for each piece of at most most_elements, and one for an empty tensor.
  void in_pieces(Requests& requests, const at::Tensor& tensor,
                 const std::function<int(void*, int, MPI_Comm, MPI_Request*)>& issue) const {
    requests.keep(tensor);
    std::int64_t begin = 0;
    do {
      const std::int64_t piece = std::min(tensor.numel() - begin, most_elements_);
      requests.add([&](MPI_Comm comm, MPI_Request* request) {
        return issue(data_of(tensor, begin), static_cast<int>(piece), comm, request);
      });
      begin += piece;
    } while (begin < tensor.numel());
  }

  struct Layout {
    std::vector<int> counts, begins;
  };
  // The counts and displacements of consecutive parts, or of the same elements for each rank. No sizes: no
  // elements.
  Layout layout(const Call& check, const Sizes& sizes, bool consecutive) const {
    Layout layout{std::vector<int>(ranks(), 0), std::vector<int>(ranks(), 0)};
    std::int64_t total = 0;
    for (std::size_t r = 0; r < sizes.size(); ++r) {
      layout.counts[r] = count(sizes[r], check);
      layout.begins[r] = consecutive ? count(total, check) : 0;
      total += sizes[r];
    }
    return layout;
  }
  // Sends sent[r] elements of the inputs to rank r, and received[r] elements of the outputs come from it.
  // Both are one tensor, one for each rank, or none.
  Step exchange(const Call& check, const Tensors& outputs, const Sizes& received, const Tensors& inputs,
                const Sizes& sent, bool consecutive = true) const {
    const at::Tensor like = inputs.empty() ? outputs[0] : inputs[0];
    return [outputs, inputs, like, from = layout(check, received, true),
            to = layout(check, sent, consecutive),
            elements = std::accumulate(received.begin(), received.end(), std::int64_t{0}),
            type = copied_type(like, check)](Requests& requests) {
      const at::Tensor output = outputs.size() == 1 ? outputs[0] : at::empty({elements}, like.options());
      at::Tensor input = joined(inputs, like);
      if (overlap(output, input)) input = input.clone();
      requests.keep(Tensors{input, output});
      const int *counts_to = requests.keep(to.counts).data(), *begins_to = requests.keep(to.begins).data(),
                *counts_from = requests.keep(from.counts).data(),
                *begins_from = requests.keep(from.begins).data();
      requests.add([&](MPI_Comm comm, MPI_Request* request) {
        return MPI_Ialltoallv(data_of(input), counts_to, begins_to, type, data_of(output), counts_from,
                              begins_from, type, comm, request);
      });
      if (outputs.size() > 1) requests.finish.push_back([output, outputs] { distribute(output, outputs); });
    };
  }

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

// Completes the requests, or throws PeerError at the timeout.
void complete(Requests& requests, std::chrono::milliseconds timeout) {
  if (queue::poll_until([&] { return requests.isCompleted(); }, timeout)) return;
  keeper().abandoned = true;  // another rank may wait in MPI, even if these complete now
  throw_peer_error(requests.where, fmt::format("not all of its ranks within {} ms", timeout.count()),
                   "all of them to make it",
                   "See which rank does not come, or raise parallel.timeout_seconds");
}

// MPI_Comm_create_group waits without a timeout, so it is called after all members have arrived: each sends
// its mark to the first one, which then sends its own to each.
void meet(const std::vector<int>& ranks, std::uint64_t mark, int tag, const std::string& where,
          std::chrono::milliseconds timeout) {
  int self = 0;
  MPI_Comm_rank(keeper().control, &self);
  const auto marks = std::make_shared<std::vector<std::uint64_t>>(ranks.size() + 1, mark);  // the last: sent
  const auto exchange_with = [&](std::size_t first, std::size_t end, bool receives, bool sends) {
    const auto requests = c10::make_intrusive<Requests>(keeper().control, where);
    requests->keep(marks);
    {
      const CallScope scope;
      for (std::size_t i = first; i < end && receives; ++i)
        requests->add([&](MPI_Comm comm, MPI_Request* request) {
          return MPI_Irecv(&(*marks)[i], 1, MPI_UINT64_T, ranks[i], tag, comm, request);
        });
      for (std::size_t i = first; i < end && sends; ++i)
        requests->add([&](MPI_Comm comm, MPI_Request* request) {
          return MPI_Isend(&marks->back(), 1, MPI_UINT64_T, ranks[i], tag, comm, request);
        });
    }
    complete(*requests, timeout);
  };
  if (self == ranks[0]) {
    exchange_with(1, ranks.size(), true, false);
    exchange_with(1, ranks.size(), false, true);
  } else {
    exchange_with(0, 1, true, true);
  }
  for (std::size_t i = 0; i < ranks.size(); ++i)
    if ((*marks)[i] != mark)
      throw_peer_error(where, fmt::format("rank {} makes another group now", ranks[i]),
                       "the same ranks and name on all members, in the same order",
                       "Make groups in one order on all ranks");
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
    throw_peer_error("joining through MPI",
                     fmt::format("MPI_Init still waits for other ranks after {} ms", timeout.count()),
                     "all ranks to start",
                     "See which rank does not start, or raise parallel.timeout_seconds");
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
  const std::string where = fmt::format("making group '{}' (mpi)", name);
  const auto copy = std::make_shared<MPI_Comm>(MPI_COMM_NULL);
  const auto requests = c10::make_intrusive<Requests>(keeper().control, where);
  requests->keep(copy);
  {
    const CallScope scope;
    requests->add(
        [&](MPI_Comm comm, MPI_Request* request) { return MPI_Comm_idup(comm, copy.get(), request); });
  }
  complete(*requests, std::max<std::chrono::milliseconds>(timeout, kLeastStart));
  const CallScope scope;
  return make(*copy, name, timeout, most_elements);
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
