// Operations that advance by polling: those of MPI, and those in several stages, each an operation of a
// backend. They have a common failure, timeouts, and a place in errors.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

namespace isograd::queue {

// Calls `done` until it returns true: spins, yields, then naps of up to 1 ms. False after `timeout`.
bool poll_until(const std::function<bool()>& done, std::chrono::milliseconds timeout);

using Works = c10::intrusive_ptr<c10d::Work>;

// The work itself where polling completes it, as ours. Other backends may complete a work only while somebody
// waits for it (Gloo's messages), so a thread of its own waits for theirs, as long as their timeout.
Works polled(Works work);

// A work that a stage waits for. `from`: who is missing if it does not complete; empty: unknown.
struct Part {
  Works work;
  std::string from{};
};

// A backend takes its operations in one order on all ranks. So each stage has a place in that order: an
// operation starts its stage at a place once all earlier operations have started theirs up to that place.
struct Stage {
  int place = 0;                             // ascending within an operation
  std::function<std::vector<Part>()> begin;  // does not wait
  std::function<void()> end = [] {};         // called once all parts are complete
};

struct Operation {
  std::string where;  // "all_reduce #7 of group 'world' (shm+mpi) on rank 1 of 4", and the source's place
  std::uint64_t sequence = 0;
  std::vector<Stage> stages{};
  std::vector<Part> under_way{};
  std::size_t begun = 0;  // number of stages begun
  bool complete = false;
  std::exception_ptr error{};
};

// The operations of one rank in one group. They advance only in calls of begin(), advance() and wait().
class Queue : public std::enable_shared_from_this<Queue> {
 public:
  // The group and this rank, for errors.
  struct Names {
    std::string group, backend;
    int rank, size;
    bool peers_know_more = false;  // ranks of this host may know which other host is missing
  };
  // `give_up` is called once, with the reason, when something fails: the remaining operations cannot
  // complete.
  Queue(Names names, std::chrono::milliseconds timeout, std::function<void(const std::string&)> give_up)
      : names_(std::move(names)), timeout_(timeout), give_up_(std::move(give_up)) {}

  // Begins an operation in stages. PeerError when an operation has failed earlier.
  Works begin(const std::string& name, std::vector<Stage> stages, std::chrono::milliseconds timeout);
  // An operation that another backend starts, given its place in errors. The queue only waits for it.
  Works follow(const std::string& name, const std::function<Works(const std::string& where)>& start,
               std::chrono::milliseconds timeout = c10d::kUnsetTimeout);
  // Moves every operation on as far as possible. Returns true once this one is complete; throws its error if
  // it failed.
  bool advance(const std::shared_ptr<Operation>& operation);
  // PeerError on timeout, naming who is missing where that is known.
  void wait(const std::shared_ptr<Operation>& operation, std::chrono::milliseconds timeout);
  void fail(const std::string& reason) noexcept;
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

 private:
  std::shared_ptr<Operation> made(const std::string& name, std::vector<Stage> stages);
  Works work(std::shared_ptr<Operation> operation, std::chrono::milliseconds timeout, Works followed);
  std::set<std::string> awaited_from(const Operation& operation);  // other hosts
  void advance_all(const Operation* awaited = nullptr);            // REQUIRES: mutex_
  bool advance_one(Operation& operation);                          // REQUIRES: mutex_
  int place_of_next(const Operation& operation) const;
  void fail(std::exception_ptr error, const std::string& reason);  // REQUIRES: mutex_

  const Names names_;
  std::atomic<std::chrono::milliseconds> timeout_;  // of waits without one of their own
  std::function<void(const std::string&)> give_up_;
  std::mutex mutex_;  // guards the members below
  std::uint64_t sequence_ = 0;
  std::string failure_;
  std::deque<std::shared_ptr<Operation>> staged_, followed_;
};

}  // namespace isograd::queue
