// The pending operations of a communicator, and the wait for them.
#pragma once

#include <ATen/core/Tensor.h>
#include <mpi.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace isograd::mpi {

// The requests of one call, with the memory that MPI may read or write until they are complete.
struct Operation {
  std::string where;  // "all_reduce #7 of group 'world' (mpi) on rank 1 of 4", and the place in the source
  std::uint64_t sequence = 0;
  std::vector<MPI_Request> requests;
  std::vector<MPI_Status> statuses;
  std::vector<at::Tensor> used;
  std::deque<std::vector<int>> counts;
  std::function<void(const Operation&)> finish;  // called once all requests are complete; may throw
  bool complete = false;
  std::mutex mutex;

  // The place for MPI's next request.
  MPI_Request* next() { return &requests.emplace_back(MPI_REQUEST_NULL); }
};

// A communicator with the state that its operations share.
class Channel {
 public:
  Channel(MPI_Comm comm, std::string name, std::chrono::milliseconds timeout);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  MPI_Comm comm() const { return comm_; }
  const std::string& name() const { return name_; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  std::chrono::milliseconds timeout() const;
  void set_timeout(std::chrono::milliseconds timeout);

  // Starts the next operation; `issue` makes its requests. PeerError at once if the channel is poisoned.
  std::shared_ptr<Operation> start(const std::string& name, const std::function<void(Operation&)>& issue);
  // Returns true once it is complete. PeerError if MPI reports an error or the channel is poisoned.
  bool advance(Operation& operation);
  void wait(Operation& operation, std::chrono::milliseconds timeout);
  // Keeps an operation that nobody will poll again until it is complete.
  void leave(std::shared_ptr<Operation> operation);
  // Every later call and wait throws PeerError with this reason.
  void poison(const std::string& reason);

 private:
  void refuse_if_poisoned(const std::string& where);
  void sweep();

  MPI_Comm comm_;
  std::string name_;
  int rank_ = 0, size_ = 1;
  mutable std::mutex mutex_;  // guards the members below
  std::chrono::milliseconds timeout_;
  std::string poison_;
  std::uint64_t sequence_ = 0;
  std::list<std::shared_ptr<Operation>> left_;
};

class MpiWork final : public c10d::Work {
 public:
  MpiWork(std::shared_ptr<Channel> channel, std::shared_ptr<Operation> operation, c10d::OpType type,
          std::vector<at::Tensor> results, std::chrono::milliseconds timeout);
  ~MpiWork() override;
  bool isCompleted() override;  // keeps an error for wait() and exception()
  bool isSuccess() const override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  std::vector<at::Tensor> result() override { return results_; }
  int sourceRank() const override;
  std::uint64_t getSequencenumber() const override { return operation_->sequence; }
  // Returns a completed future: MPI advances only in a waiting thread, so the wait happens here.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  std::shared_ptr<Channel> channel_;
  std::shared_ptr<Operation> operation_;
  std::vector<at::Tensor> results_;
  std::chrono::milliseconds timeout_;
};

}  // namespace isograd::mpi
