#include "comm/mpi/work.hpp"

#include <ATen/core/ivalue.h>
#include <fmt/format.h>

#include <filesystem>

#include "comm/call_site.hpp"
#include "comm/mpi/runtime.hpp"
#include "comm/poll.hpp"
#include "isograd/error.hpp"

namespace isograd::mpi {
namespace {

// MPI may still write to the memory of an abandoned operation, so it is never freed.
void keep_for_ever(std::shared_ptr<Operation> operation) {
  static auto* mutex = new std::mutex;
  static auto* kept = new std::list<std::shared_ptr<Operation>>;
  const std::lock_guard lock(*mutex);
  kept->push_back(std::move(operation));
}

}  // namespace

Channel::Channel(MPI_Comm comm, std::string name, std::chrono::milliseconds timeout)
    : comm_(comm), name_(std::move(name)), timeout_(timeout) {
  const CallScope scope;
  check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), name_);
  MPI_Comm_rank(comm_, &rank_);
  MPI_Comm_size(comm_, &size_);
}

Channel::~Channel() {
  if (!running()) return;
  try {
    sweep();
  } catch (...) {  // the remaining requests are abandoned
  }
  for (auto& operation : left_) keep_for_ever(std::move(operation));
  if (!left_.empty()) abandon();
  if (!left_.empty() || !poison_.empty()) return;  // freeing might wait for pending requests
  const CallScope scope;
  MPI_Comm_free(&comm_);
}

std::chrono::milliseconds Channel::timeout() const {
  const std::lock_guard lock(mutex_);
  return timeout_;
}

void Channel::set_timeout(std::chrono::milliseconds timeout) {
  const std::lock_guard lock(mutex_);
  timeout_ = timeout;
}

std::shared_ptr<Operation> Channel::start(const std::string& name,
                                          const std::function<void(Operation&)>& issue) {
  sweep();
  auto operation = std::make_shared<Operation>();
  {
    const std::lock_guard lock(mutex_);
    operation->sequence = sequence_++;
  }
  operation->where = fmt::format("{} #{} of group '{}' (mpi) on rank {} of {}", name, operation->sequence,
                                 name_, rank_, size_);
  if (const CallSite site = current_call_site(); site.file) {
    operation->where +=
        fmt::format(" at {}:{}", std::filesystem::path(site.file).filename().string(), site.line);
  }
  refuse_if_poisoned(operation->where);
  try {
    const CallScope scope;
    issue(*operation);
  } catch (...) {
    if (!operation->requests.empty()) leave(operation);
    throw;
  }
  operation->statuses.resize(operation->requests.size());
  return operation;
}

bool Channel::advance(Operation& operation) {
  const std::lock_guard own(operation.mutex);
  if (operation.complete) return true;
  refuse_if_poisoned(operation.where);
  int flag = 0;
  {
    const CallScope scope;
    const int count = static_cast<int>(operation.requests.size());
    int code = MPI_Testall(count, operation.requests.data(), &flag, operation.statuses.data());
    if (code == MPI_ERR_IN_STATUS) {
      for (const MPI_Status& status : operation.statuses) {
        if (status.MPI_ERROR != MPI_SUCCESS && status.MPI_ERROR != MPI_ERR_PENDING) code = status.MPI_ERROR;
      }
    }
    check(code, operation.where);
  }
  if (!flag) return false;
  if (operation.finish) operation.finish(operation);
  operation.complete = true;
  operation.used.clear();
  return true;
}

void Channel::wait(Operation& operation, std::chrono::milliseconds timeout) {
  if (poll_until([&] { return advance(operation); }, timeout)) return;
  const PeerError error(
      {.where = operation.where,
       .found = fmt::format("not complete within {} ms", timeout.count()),
       .expected = "all ranks of the group to take part in time",
       .action = "Look for a rank that has stopped, failed or calls something else; then recreate the "
                 "group (parallel.timeout_seconds sets the limit)"});
  poison(error.what());
  throw error;
}

void Channel::leave(std::shared_ptr<Operation> operation) {
  const std::lock_guard lock(mutex_);
  left_.push_back(std::move(operation));
}

void Channel::poison(const std::string& reason) {
  abandon();
  const std::lock_guard lock(mutex_);
  if (poison_.empty()) poison_ = reason;
}

void Channel::refuse_if_poisoned(const std::string& where) {
  const std::lock_guard lock(mutex_);
  if (poison_.empty()) return;
  throw PeerError({.where = where,
                   .found = fmt::format("a group that failed earlier: {}", poison_),
                   .expected = "a group in which nothing has failed",
                   .action = "Recreate the group"});
}

void Channel::sweep() {
  std::list<std::shared_ptr<Operation>> left;
  {
    const std::lock_guard lock(mutex_);
    if (!poison_.empty()) return;
    left.swap(left_);
  }
  for (auto& operation : left) {
    if (!advance(*operation)) leave(operation);
  }
}

MpiWork::MpiWork(std::shared_ptr<Channel> channel, std::shared_ptr<Operation> operation, c10d::OpType type,
                 std::vector<at::Tensor> results, std::chrono::milliseconds timeout)
    : c10d::Work(channel->rank(), type),
      channel_(std::move(channel)),
      operation_(std::move(operation)),
      results_(std::move(results)),
      timeout_(timeout) {}

MpiWork::~MpiWork() {
  const std::lock_guard lock(operation_->mutex);
  if (!operation_->complete) channel_->leave(operation_);
}

bool MpiWork::isCompleted() {
  if (c10d::Work::isCompleted()) return true;
  try {
    if (!channel_->advance(*operation_)) return false;
    finish();
  } catch (const std::exception& error) {
    channel_->poison(error.what());
    finish(std::current_exception());
  }
  return true;
}

bool MpiWork::isSuccess() const {
  const std::lock_guard lock(operation_->mutex);
  return operation_->complete;
}

bool MpiWork::wait(std::chrono::milliseconds timeout) {
  if (const auto error = exception()) std::rethrow_exception(error);
  if (c10d::Work::isCompleted()) return true;
  try {
    channel_->wait(*operation_, timeout == kNoTimeout ? timeout_ : timeout);
  } catch (const std::exception& error) {
    channel_->poison(error.what());
    finish(std::current_exception());
    throw;
  }
  finish();
  return true;
}

int MpiWork::sourceRank() const {
  const std::lock_guard lock(operation_->mutex);
  return operation_->complete && !operation_->statuses.empty() ? operation_->statuses.front().MPI_SOURCE : -1;
}

c10::intrusive_ptr<c10::ivalue::Future> MpiWork::getFuture() {
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  try {
    wait();
    future->markCompleted(c10::IValue(results_));
  } catch (...) {
    future->setError(std::current_exception());
  }
  return future;
}

}  // namespace isograd::mpi
