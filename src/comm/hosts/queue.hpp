// Operations in several stages. Each stage is an operation of a backend and starts when the previous stage
// ends.
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

// Places whose messages two operations might confuse have separate tags.
enum Place : int { kReduceWithin, kExchange, kReturn, kGatherWithin };

inline constexpr int kFirstTag = 32760;  // every MPI has tags up to 32767

constexpr int tag_of(Place place) {
  return kFirstTag + place;
}

// A work that a stage waits for. `from`: who is missing if it does not complete; empty: unknown.
struct Part {
  c10::intrusive_ptr<c10d::Work> work;
  std::string from;
};

// A backend takes its operations in one order on all ranks. So each stage has a place in that order: an
// operation starts its stage at a place once all earlier operations have started theirs up to that place.
struct Stage {
  int place = 0;                             // ascending within an operation
  std::function<std::vector<Part>()> begin;  // does not wait
  std::function<void()> end = [] {};         // called once all parts are complete
};

struct Operation {
  std::string where;  // "all_reduce #7 of group 'world' (shm+mpi) on rank 1 of 4"
  std::vector<Stage> stages;
  std::vector<Part> under_way{};
  std::size_t begun = 0;  // number of stages begun
  bool complete = false;
  std::exception_ptr error{};
};

// The operations of one rank in one group. They advance only in calls of begin(), advance() and wait().
class Queue {
 public:
  // `give_up` is called once, with the reason, when something fails. The remaining operations cannot
  // complete.
  Queue(std::string group, std::function<void(const std::string&)> give_up)
      : group_(std::move(group)), give_up_(std::move(give_up)) {}

  // PeerError when an operation has failed earlier.
  std::shared_ptr<Operation> begin(std::string where, std::vector<Stage> stages);
  // An operation that another backend has started. The queue only waits for it.
  std::shared_ptr<Operation> follow(std::string where, std::function<c10::intrusive_ptr<c10d::Work>()> begin);
  // Moves every operation on as far as possible. Returns true once this one is complete; throws its error if
  // it failed.
  bool advance(const std::shared_ptr<Operation>& operation);
  // PeerError on timeout, naming who is missing where that is known.
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
  std::mutex mutex_;  // guards the members below
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
