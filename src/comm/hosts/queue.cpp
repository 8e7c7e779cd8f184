#include "comm/hosts/queue.hpp"

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>

#include "comm/poll.hpp"
#include "isograd/error.hpp"

namespace isograd::hosts {

std::shared_ptr<Operation> Queue::begin(std::string where, std::vector<Stage> stages) {
  auto operation = std::make_shared<Operation>(Operation{std::move(where), std::move(stages)});
  const std::lock_guard lock(mutex_);
  refuse_if_failed(operation->where);
  staged_.push_back(operation);
  advance_all();
  return operation;
}

std::shared_ptr<Operation> Queue::follow(std::string where,
                                         std::function<c10::intrusive_ptr<c10d::Work>()> begin) {
  auto operation = std::make_shared<Operation>(Operation{std::move(where), {}});
  const std::lock_guard lock(mutex_);
  refuse_if_failed(operation->where);
  operation->under_way = {{begin(), ""}};
  followed_.push_back(operation);
  return operation;
}

bool Queue::advance(const std::shared_ptr<Operation>& operation) {
  const std::lock_guard lock(mutex_);
  if (!operation->complete) advance_all();
  if (operation->error) std::rethrow_exception(operation->error);
  return operation->complete;
}

void Queue::advance_all() {
  if (!failure_.empty()) return;
  const at::NoGradGuard no_graph;
  try {
    // An operation that moves on lets later ones start their stages at the same place.
    for (bool moved = true; moved;) {
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
    for (const auto& one : followed_) advance_one(*one);
    std::erase_if(followed_, [](const auto& one) { return one->complete; });
  } catch (const std::exception& error) {
    fail(std::current_exception(), error.what());
  }
}

// Returns true when nothing of the operation is under way. After its last stage it is complete.
bool Queue::advance_one(Operation& operation) {
  for (const Part& part : operation.under_way) {
    if (!part.work->isCompleted()) return false;
    part.work->wait();  // throws if it failed
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
  // Ranks of this host may wait for another host and know which. They report first.
  if (missing.empty()) {
    const auto longer =
        std::clamp<std::chrono::milliseconds>(timeout / 4, std::chrono::seconds(1), std::chrono::seconds(10));
    if (poll_until(advanced, longer)) return;
    missing = awaited_from(*operation), timeout += longer;
  }
  const std::lock_guard lock(mutex_);
  const PeerError error(
      {.where = operation->where,
       .found = missing.empty()
                    ? fmt::format("not complete within {} ms", timeout.count())
                    : fmt::format("nothing from {} within {} ms", fmt::join(missing, ", "), timeout.count()),
       .expected = "all ranks of the group to take part in time",
       .action = "Look for a host or a rank that has stopped, failed or calls something else; then "
                 "recreate the group (parallel.timeout_seconds sets the limit)"});
  fail(std::make_exception_ptr(error), error.what());
  throw error;
}

void Queue::refuse_if_failed(const std::string& where) const {
  if (failure_.empty()) return;
  throw PeerError({.where = where,
                   .found = fmt::format("a group that failed earlier: {}", failure_),
                   .expected = "a group in which nothing has failed",
                   .action = "Recreate the group"});
}

void Queue::fail(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  fail(std::make_exception_ptr(PeerError({.where = fmt::format("group '{}' (shm+mpi)", group_),
                                          .found = reason,
                                          .expected = "a group that this rank has not given up",
                                          .action = "Recreate the group"})),
       reason);
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

bool QueueWork::isCompleted() {
  if (c10d::Work::isCompleted()) return true;
  try {
    if (!queue_->advance(operation_)) return false;
    finish();
  } catch (const std::exception&) {
    finish(std::current_exception());
  }
  return true;
}

bool QueueWork::wait(std::chrono::milliseconds timeout) {
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

}  // namespace isograd::hosts
