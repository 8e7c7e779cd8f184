#include "comm/queue.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sched.h>

#include <algorithm>
#include <limits>
#include <thread>

#include "base/refuse.hpp"
#include "comm/call.hpp"
#include "comm/failures.hpp"
#include "comm/shm/backend.hpp"
#include "isograd/error.hpp"

namespace isograd::queue {
namespace {

class QueueWork final : public c10d::Work {
 public:
  QueueWork(std::shared_ptr<Queue> queue, std::shared_ptr<Operation> operation, int rank,
            std::chrono::milliseconds timeout, Works followed)
      : c10d::Work(rank, followed ? followed->retrieveOpType() : c10d::OpType::UNKNOWN),
        queue_(std::move(queue)),
        operation_(std::move(operation)),
        timeout_(timeout),
        followed_(std::move(followed)) {}

  bool isCompleted() override {  // keeps an error for wait() and exception()
    if (c10d::Work::isCompleted()) return true;
    try {
      if (!queue_->advance(operation_)) return false;
      finish();
    } catch (...) {
      finish(std::current_exception());
    }
    return true;
  }
  bool isSuccess() const override {
    return const_cast<QueueWork*>(this)->c10d::Work::isCompleted() && !exception();
  }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    if (const auto error = exception()) std::rethrow_exception(error);
    if (c10d::Work::isCompleted()) return true;
    try {
      queue_->wait(operation_, timeout == kNoTimeout ? timeout_ : timeout);
    } catch (...) {
      finish(std::current_exception());
      throw;
    }
    finish();
    return true;
  }
  void synchronize() override { wait(); }
  std::vector<at::Tensor> result() override { return followed_ ? followed_->result() : c10d::Work::result(); }
  int sourceRank() const override { return followed_ ? followed_->sourceRank() : -1; }
  std::uint64_t getSequencenumber() const override { return operation_->sequence; }
  // Operations advance only in a waiting thread, so the wait happens here.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    try {
      wait();
      future->markCompleted(c10::IValue(result()));
    } catch (...) {
      future->setError(std::current_exception());
    }
    return future;
  }

 private:
  std::shared_ptr<Queue> queue_;
  std::shared_ptr<Operation> operation_;
  std::chrono::milliseconds timeout_;
  Works followed_;
};

// A thread for each work. Only tests carry messages by such a backend; MPI's and ours need none.
class WaitedFor final : public c10d::Work {
 public:
  explicit WaitedFor(Works work)
      : work_(std::move(work)), waiter_([this] {
          try {
            work_->wait();
            finish();
          } catch (...) {
            finish(std::current_exception());
          }
        }) {}
  ~WaitedFor() override { waiter_.join(); }
  std::vector<at::Tensor> result() override { return work_->result(); }
  int sourceRank() const override { return work_->sourceRank(); }

 private:
  Works work_;
  std::thread waiter_;
};

constexpr const char *kExpected = "all ranks of the group to take part in time",
                     *kAction =
                         "Find the host or rank that stopped, failed or called another operation, then "
                         "restart all ranks; parallel.timeout_seconds sets the limit";

// Throws the error of a complete part that failed. The part's backend knows ranks and not hosts, and its own
// timeout may be over first, so the error names the host that was awaited.
void check(const Part& part, const Operation& operation) {
  try {
    part.work->wait();
  } catch (const std::exception& error) {
    const auto* ours = dynamic_cast<const Error*>(&error);
    if (part.from.empty() || (ours && !dynamic_cast<const PeerError*>(ours))) throw;
    const ErrorText text{
        .where = operation.where,
        .found = fmt::format("nothing from {}: {}", part.from, ours ? ours->text().found : error.what()),
        .expected = kExpected,
        .action = kAction};
    if (const auto* relayed = dynamic_cast<const RelayedError*>(ours))
      throw RelayedError(text, relayed->of_operation());
    throw PeerError(text);
  }
}

}  // namespace

Works polled(Works work) {
  const bool ours = dynamic_cast<ShmWork*>(work.get()) || dynamic_cast<QueueWork*>(work.get());
  return ours ? work : Works(c10::make_intrusive<WaitedFor>(std::move(work)));
}

bool poll_until(const std::function<bool()>& done, std::chrono::milliseconds timeout) {
  constexpr int kSpins = 64;
  constexpr auto kYieldTime = std::chrono::milliseconds(1);
  constexpr auto kLongestNap = std::chrono::microseconds(1000);
  for (int i = 0; i < kSpins; ++i)
    if (done()) return true;
  const auto begin = std::chrono::steady_clock::now();
  auto nap = std::chrono::microseconds(20);
  for (;;) {
    if (done()) return true;
    const auto waited = std::chrono::steady_clock::now() - begin;
    if (waited >= timeout) return false;
    if (waited < kYieldTime) {
      ::sched_yield();
    } else {
      std::this_thread::sleep_for(nap);
      nap = std::min(2 * nap, kLongestNap);
    }
  }
}

std::shared_ptr<Operation> Queue::made(const std::string& name, std::vector<Stage> stages) {
  const std::string numbered = fmt::format("{} #{}", name, sequence_);
  const Call call(numbered, names_.group, names_.rank, names_.size, names_.backend.c_str());
  auto operation = std::make_shared<Operation>(Operation{call.where(), sequence_++, std::move(stages)});
  if (!failure_.empty())
    throw_peer_error(operation->where, fmt::format("a group that failed earlier: {}", failure_),
                     "a group in which nothing has failed", "Recreate the group");
  return operation;
}

Works Queue::work(std::shared_ptr<Operation> operation, std::chrono::milliseconds timeout, Works followed) {
  return c10::make_intrusive<QueueWork>(shared_from_this(), std::move(operation), names_.rank,
                                        timeout == c10d::kUnsetTimeout ? timeout_.load() : timeout,
                                        std::move(followed));
}

Works Queue::begin(const std::string& name, std::vector<Stage> stages, std::chrono::milliseconds timeout) {
  const std::lock_guard lock(mutex_);
  const auto operation = staged_.emplace_back(made(name, std::move(stages)));
  advance_all();
  return work(operation, timeout, nullptr);
}

Works Queue::follow(const std::string& name, const std::function<Works(const std::string& where)>& start,
                    std::chrono::milliseconds timeout) {
  const std::lock_guard lock(mutex_);
  advance_all();  // an error of an earlier operation is this call's too
  const auto operation = made(name, {});
  const Works followed = start(operation->where);
  operation->under_way = {{followed}};
  followed_.push_back(operation);
  return work(operation, timeout, followed);
}

bool Queue::advance(const std::shared_ptr<Operation>& operation) {
  const std::lock_guard lock(mutex_);
  if (!operation->complete) advance_all(operation.get());
  if (operation->error) std::rethrow_exception(operation->error);
  return operation->complete;
}

// Operations that another backend carries advance by themselves. They are polled here where an operation in
// stages may wait for a rank that waits for them, and where nobody holds their work any more.
void Queue::advance_all(const Operation* awaited) {
  if (!failure_.empty()) return;
  const at::NoGradGuard no_graph;
  try {
    // An operation that moves on lets later ones start their stages at the same place.
    for (bool moved = !staged_.empty(); moved;) {
      moved = false;
      for (std::size_t i = 0; i < staged_.size(); ++i) {
        const auto free_to = [&](int place) {
          return std::all_of(staged_.begin(), staged_.begin() + static_cast<std::ptrdiff_t>(i),
                             [&](const auto& before) { return place_of_next(*before) > place; });
        };
        Operation& operation = *staged_[i];
        while (advance_one(operation) && operation.begun < operation.stages.size() &&
               free_to(operation.stages[operation.begun].place)) {
          operation.under_way = operation.stages[operation.begun++].begin();
          moved = true;
        }
      }
      std::erase_if(staged_, [](const auto& one) { return one->complete; });
    }
    for (const auto& one : followed_)
      if (!staged_.empty() || one.get() == awaited || one.use_count() == 1) advance_one(*one);
    std::erase_if(followed_, [](const auto& one) { return one->complete; });
  } catch (const std::exception& error) {
    fail(std::current_exception(), error.what());
  }
}

// Returns true when nothing of the operation is under way. After its last stage it is complete.
bool Queue::advance_one(Operation& operation) {
  for (const Part& part : operation.under_way) {
    if (!part.work->isCompleted()) return false;
    check(part, operation);
  }
  if (!operation.under_way.empty() || operation.begun > 0) {
    if (operation.begun > 0) std::exchange(operation.stages[operation.begun - 1].end, [] {})();
    operation.under_way.clear();
    operation.complete = operation.begun == operation.stages.size();
    if (operation.complete) operation.stages.clear(), operation.begun = 0;  // frees its tensors
  } else if (operation.stages.empty()) {
    operation.complete = true;
  }
  return true;
}

int Queue::place_of_next(const Operation& operation) const {
  return operation.begun < operation.stages.size() ? operation.stages[operation.begun].place
                                                   : std::numeric_limits<int>::max();
}

std::set<std::string> Queue::awaited_from(const Operation& operation) {
  const std::lock_guard lock(mutex_);
  std::set<std::string> missing;
  for (const Part& part : operation.under_way)
    if (!part.from.empty() && !part.work->isCompleted()) missing.insert(part.from);
  return missing;
}

void Queue::wait(const std::shared_ptr<Operation>& operation, std::chrono::milliseconds timeout) {
  const auto advanced = [&] { return advance(operation); };
  if (poll_until(advanced, timeout)) return;
  std::set<std::string> missing = awaited_from(*operation);
  if (names_.peers_know_more && missing.empty()) {  // they report first
    const auto longer =
        std::clamp<std::chrono::milliseconds>(timeout / 4, std::chrono::seconds(1), std::chrono::seconds(10));
    if (poll_until(advanced, longer)) return;
    missing = awaited_from(*operation), timeout += longer;
  }
  const std::lock_guard lock(mutex_);
  const PeerError error({.where = operation->where,
                         .found = missing.empty() ? fmt::format("not complete within {} ms", timeout.count())
                                                  : fmt::format("nothing from {} within {} ms",
                                                                fmt::join(missing, ", "), timeout.count()),
                         .expected = kExpected,
                         .action = kAction});
  fail(std::make_exception_ptr(error), error.what());
  throw error;
}

void Queue::fail(const std::string& reason) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    fail(std::make_exception_ptr(
             PeerError({.where = fmt::format("group '{}' ({})", names_.group, names_.backend),
                        .found = reason,
                        .expected = "a group that this rank has not given up",
                        .action = "Recreate the group"})),
         reason);
  } catch (...) {  // no memory for the reason: the peers' timeouts remain
  }
}

// Works may still write to the operations' tensors, so the queue keeps them.
void Queue::fail(std::exception_ptr error, const std::string& reason) {
  if (!failure_.empty()) return;
  failure_ = reason.empty() ? "for no reason that was given" : reason;
  for (auto* operations : {&staged_, &followed_})
    for (const auto& one : *operations)
      if (!one->complete) one->error = error;
  give_up_(failure_);
}

}  // namespace isograd::queue
