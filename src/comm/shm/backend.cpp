// c10d's operations as tasks of the engine, and the handle of those under way.
#include "comm/shm/backend.hpp"

#include <ATen/ops/from_blob.h>
#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <condition_variable>
#include <functional>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/refuse.hpp"

namespace isograd {
namespace {

std::int8_t code_of(const at::Tensor& tensor) { return static_cast<std::int8_t>(tensor.scalar_type()); }

shm::Region region_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()};
}

// `used` and `more` are kept alive until the task is complete.
std::shared_ptr<shm::Task> made(std::shared_ptr<shm::Task> task, Tensors used, const Tensors& more = {}) {
  used.insert(used.end(), more.begin(), more.end());
  task->keep_alive = std::make_shared<Tensors>(std::move(used));
  return task;
}

}  // namespace

ShmBackend::ShmBackend(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::string name,
                       std::chrono::milliseconds timeout, shm::EngineOptions options)
    : CheckedBackend(rank, size, std::move(name), "shm", /*uneven_at_root=*/false),
      store_(c10::make_intrusive<c10d::PrefixStore>("shm/" + name_, std::move(store))),
      timeout_(timeout),
      engine_(std::make_shared<shm::Engine>(*store_, rank, size, name_, timeout, std::move(options))) {}

ShmBackend::Works ShmBackend::reduce_scatter_with_squares(const at::Tensor& output, const at::Tensor& input,
                                                          std::shared_ptr<double> squares,
                                                          std::chrono::milliseconds timeout) {
  const Call check = call("reduce_scatter");
  check.piece(output);
  return run(check,
             {reduce_scattered(check, output, {{input}, check.cut(input, output)},
                               check.reduction(input, c10d::ReduceOp::SUM), std::move(squares))},
             OpType::_REDUCE_SCATTER_BASE, {output}, timeout);
}

shm::Fingerprint ShmBackend::print_of(shm::Kind kind, const at::Tensor& tensor, int root) {
  if (root == kAllRanks && kind == shm::Kind::kReduce) kind = shm::Kind::kAllReduce, root = 0;
  if (root == kAllRanks && kind == shm::Kind::kGather) kind = shm::Kind::kAllGather, root = 0;
  return {.kind = kind, .dtype = code_of(tensor), .root = root, .count = tensor.numel()};
}

at::Tensor ShmBackend::allocate(std::int64_t numel, at::ScalarType dtype, shm::Engine::Copies copies) {
  const bool one = copies == shm::Engine::Copies::kOne;
  const auto width = static_cast<std::int64_t>(c10::elementSize(dtype));
  if (numel < 0 || numel > (std::int64_t{1} << 60) / (width * size_))
    refuse(fmt::format("{} of group '{}'", one ? "host_shared" : "empty_shared", name_),
           fmt::format("{} elements of {} bytes", numel, width), "a size that memory can have",
           "Check how the size was computed");
  auto allocation = engine_->allocate(static_cast<std::uint64_t>(numel * width), copies,
                                      static_cast<std::int8_t>(dtype), numel, timeout_);
  std::byte* data = one ? allocation->data(0) : allocation->own();
  return at::from_blob(
      data, {numel}, [allocation](void*) { allocation->release(); }, at::TensorOptions(dtype));
}

ShmBackend::Works ShmBackend::run(const Call&, Steps tasks, OpType type, Tensors results,
                                  std::chrono::milliseconds timeout, int /*peer*/) {
  for (const Task& task : tasks) engine_->start(task);
  return c10::make_intrusive<ShmWork>(engine_, std::move(tasks), rank_, type, std::move(results),
                                      timeout == c10d::kUnsetTimeout ? timeout_ : timeout);
}

ShmBackend::Task ShmBackend::make_reduce(const at::Tensor& tensor, const shm::Reduction& reduction,
                                         int root) {
  return made(shm::reduce(print_of(shm::Kind::kReduce, tensor, root), region_of(tensor), reduction),
              {tensor});
}

ShmBackend::Task ShmBackend::make_broadcast(const Call&, const at::Tensor& tensor, int root) {
  return made(
      shm::broadcast(print_of(shm::Kind::kBroadcast, tensor, root), region_of(tensor), size_, rank_ == root),
      {tensor});
}

ShmBackend::Task ShmBackend::make_gather(const Call& check, const at::Tensor& input, Parts outputs,
                                         int root) {
  check.disjoint(region_of(input), outputs.by_rank);
  const shm::Fingerprint print = print_of(shm::Kind::kGather, input, root);
  return made(shm::gather(print, region_of(input), std::move(outputs.by_rank)), std::move(outputs.tensors),
              {input});
}

ShmBackend::Task ShmBackend::make_reduce_scatter(const Call& check, const at::Tensor& output, Parts inputs,
                                                 const shm::Reduction& reduction) {
  return reduce_scattered(check, output, std::move(inputs), reduction, nullptr);
}

// The output may be this rank's own part of the input, because no peer reads that.
ShmBackend::Task ShmBackend::reduce_scattered(const Call& check, const at::Tensor& output, Parts inputs,
                                              const shm::Reduction& reduction,
                                              std::shared_ptr<double> squares) {
  check.disjoint(region_of(output), inputs.by_rank);
  return made(shm::reduce_scatter(print_of(shm::Kind::kReduceScatter, output), std::move(inputs.by_rank),
                                  region_of(output), reduction, std::move(squares)),
              std::move(inputs.tensors), {output});
}

ShmBackend::Task ShmBackend::make_scatter(const Call& check, const at::Tensor& output, Parts inputs,
                                          int root) {
  check.disjoint(region_of(output), inputs.by_rank);
  return made(shm::scatter(print_of(shm::Kind::kScatter, output, root), region_of(output),
                           std::move(inputs.by_rank), size_),
              std::move(inputs.tensors), {output});
}

ShmBackend::Task ShmBackend::make_all_to_all(const Call& check, Parts outputs, Parts inputs) {
  check.disjoint(inputs.by_rank, outputs.by_rank);
  const shm::Fingerprint print{.kind = shm::Kind::kAllToAll, .dtype = code_of(inputs.tensors[0])};
  return made(shm::all_to_all(print, std::move(outputs.by_rank), std::move(inputs.by_rank)),
              std::move(outputs.tensors), inputs.tensors);
}

ShmBackend::Task ShmBackend::make_send(const Call&, const at::Tensor& tensor, int to, int tag) {
  return made(shm::send(print_of(shm::Kind::kSend, tensor, to), region_of(tensor), tag), {tensor});
}

ShmBackend::Task ShmBackend::make_recv(const Call&, const at::Tensor& tensor, int from, int tag) {
  return made(shm::receive(print_of(shm::Kind::kReceive, tensor, from), region_of(tensor), tag), {tensor});
}

ShmBackend::Task ShmBackend::make_barrier() { return made(shm::barrier(), {}); }

namespace shm {
namespace {

// Advances `engine`. Called until it returns true; must not throw.
struct Item {
  std::shared_ptr<Engine> engine;
  std::function<bool()> poll;
};

// Advances operations for which nobody waits. A c10d Future must complete by itself (PyTorch's DDP expects
// that). The first future starts the thread; isograd itself needs none.
class ProgressThread {
 public:
  void add(Item item) {
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) return;
      arrived_.push_back(std::move(item));
      if (process_ != ::getpid()) {  // the first call, or the first after a fork, which copies no threads
        process_ = ::getpid();
        std::thread([this] { run(); }).detach();
      }
    }
    wake_.notify_one();
  }

  void stop() {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    wake_.notify_one();
    if (process_ == ::getpid()) stopped_signal_.wait(lock, [&] { return stopped_; });
  }

 private:
  void run() {
    using SteadyClock = std::chrono::steady_clock;
    std::vector<Item> items;
    auto last_moved = SteadyClock::now();
    for (;;) {
      {
        std::unique_lock lock(mutex_);
        if (items.empty()) wake_.wait(lock, [&] { return stopping_ || !arrived_.empty(); });
        if (stopping_) {
          new auto(std::move(items));  // never freed: their callbacks' owners may already be destroyed
          stopped_ = true;
          stopped_signal_.notify_all();
          return;
        }
        for (Item& item : arrived_) items.push_back(std::move(item));
        arrived_.clear();
      }
      if (std::erase_if(items, [](Item& item) { return item.poll(); }) > 0) {
        last_moved = SteadyClock::now();
      } else if (SteadyClock::now() - last_moved < std::chrono::microseconds(50)) {
        ::sched_yield();
      } else {
        // New items and other groups do not ring this bell, so the sleep is short.
        items.front().engine->nap(std::chrono::microseconds(items.size() > 1 ? 200 : 500));
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Item> arrived_;
  pid_t process_ = -1;
  std::condition_variable stopped_signal_;
  bool stopping_ = false, stopped_ = false;
};

// Outlives every static destructor, because its thread is not joined.
ProgressThread& background() {
  static auto* thread = new ProgressThread;
  return *thread;
}

}  // namespace

void stop_background() { background().stop(); }

}  // namespace shm

ShmWork::ShmWork(std::shared_ptr<shm::Engine> engine, Tasks tasks, int rank, c10d::OpType type,
                 std::vector<at::Tensor> results, std::chrono::milliseconds timeout)
    : c10d::Work(rank, type),
      engine_(std::move(engine)),
      tasks_(std::move(tasks)),
      results_(std::move(results)),
      timeout_(timeout) {}

// Takes effect once: the waiting thread and the future's thread may both call it.
void ShmWork::end(std::exception_ptr error) {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock(future_mutex_);
    if (!c10d::Work::isCompleted()) finish(error);
    if (future_ && !future_ended_) future = future_;
    future_ended_ = future_ended_ || future;
  }
  if (!future) return;
  if (const auto failure = exception()) {
    future->setError(failure);
  } else {
    future->markCompleted(c10::IValue(results_));
  }
}

bool ShmWork::progress() {
  if (auto error = exception()) std::rethrow_exception(error);
  if (c10d::Work::isCompleted()) return true;
  for (const auto& task : tasks_)
    if (!engine_->progress(*task, timeout_)) return false;
  end();
  return true;
}

bool ShmWork::isCompleted() {
  if (c10d::Work::isCompleted()) return true;
  try {
    return progress();
  } catch (...) {
    end(std::current_exception());
    return true;
  }
}

bool ShmWork::isSuccess() const {
  return const_cast<ShmWork*>(this)->c10d::Work::isCompleted() && !exception();
}

bool ShmWork::wait(std::chrono::milliseconds timeout) {
  if (auto error = exception()) std::rethrow_exception(error);
  if (c10d::Work::isCompleted()) return true;
  try {
    for (const auto& task : tasks_) engine_->wait(*task, timeout == kNoTimeout ? timeout_ : timeout);
  } catch (...) {
    end(std::current_exception());
    throw;
  }
  end();
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> ShmWork::getFuture() {
  bool first = false;
  {
    const std::lock_guard lock(future_mutex_);
    first = !future_;
    if (first)
      future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  }
  if (first) {
    if (isCompleted()) {
      end();
    } else {
      // The work must outlive its operation even if the caller drops it.
      auto self = c10::intrusive_ptr<ShmWork>::reclaim_copy(this);
      shm::background().add({engine_, [self] { return self->isCompleted(); }});
    }
  }
  return future_;
}

int ShmWork::sourceRank() const { return tasks_.empty() ? c10d::Work::sourceRank() : tasks_[0]->source(); }

std::uint64_t ShmWork::getSequencenumber() const { return tasks_.empty() ? 0 : tasks_[0]->number(); }

}  // namespace isograd
