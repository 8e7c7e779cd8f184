// Operations in several stages, each an operation of some backend that begins where the one before ends.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace isograd::hosts {

// What a stage waits for. `from`: who is missing if it does not come, in words; empty: nobody knows.
struct Part {
  c10::intrusive_ptr<c10d::Work> work;
  std::string from;
};

// A backend takes its operations in one order on all ranks. So stages have a place, which says whose order
// they keep: an operation begins its stage at a place once all earlier ones have begun theirs up to there.
struct Stage {
  int place = 0;                             // ascending within an operation
  std::function<std::vector<Part>()> begin;  // does not wait
  std::function<void()> end = [] {};         // once all parts are there
};

struct Operation {
  std::string where;  // "all_reduce #7 of group 'world' (shm+mpi) on rank 1 of 4"
  std::vector<Stage> stages;
  std::vector<Part> under_way{};
  std::size_t begun = 0;  // stages
  bool complete = false;
  std::exception_ptr error{};
};

// The operations of one rank in one group. Nothing moves but in calls of begin() and advance().
class Queue {
 public:
  // `give_up` is called once, with why, when something has failed: nothing can be told of what is left.
  Queue(std::string group, std::function<void(const std::string&)> give_up)
      : group_(std::move(group)), give_up_(std::move(give_up)) {}

  // PeerError when an operation has failed earlier.
  std::shared_ptr<Operation> begin(std::string where, std::vector<Stage> stages);
  // What another backend has begun by itself: only waited for.
  std::shared_ptr<Operation> follow(std::string where, std::function<c10::intrusive_ptr<c10d::Work>()> begin);
  // Moves every operation on as far as it goes. True once this one is complete; its error, if it failed.
  bool advance(const std::shared_ptr<Operation>& operation);
  // PeerError, which says who is missing where that is known.
  void wait(const std::shared_ptr<Operation>& operation, std::chrono::milliseconds timeout);
  void fail(const std::string& reason);

 private:
  std::set<std::string> awaited_from(const Operation& operation);  // other hosts
  void advance_all();                                              // REQUIRES: mutex_
  bool advance_one(Operation& operation);                          // REQUIRES: mutex_
  int place_of_next(const Operation& operation) const;
  void refuse_if_failed(const std::string& where) const;           // REQUIRES: mutex_
  void fail(std::exception_ptr error, const std::string& reason);  // REQUIRES: mutex_

  std::string group_;
  std::function<void(const std::string&)> give_up_;
  std::mutex mutex_;  // guards what follows
  std::string failure_;
  std::deque<std::shared_ptr<Operation>> staged_, followed_;
};

class QueueWork final : public c10d::Work {
 public:
  QueueWork(std::shared_ptr<Queue> queue, std::shared_ptr<Operation> operation, int rank,
            std::chrono::milliseconds timeout)
      : c10d::Work(rank), queue_(std::move(queue)), operation_(std::move(operation)), timeout_(timeout) {}
  bool isCompleted() override;  // an error is kept for wait() and exception()
  bool isSuccess() const override {
    return const_cast<QueueWork*>(this)->c10d::Work::isCompleted() && !exception();
  }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }

 private:
  std::shared_ptr<Queue> queue_;
  std::shared_ptr<Operation> operation_;
  std::chrono::milliseconds timeout_;
};

}  // namespace isograd::hosts
