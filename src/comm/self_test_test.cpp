// Faults planted in one collective at a time: the self-test of a group must name it, on every rank.
#include "comm/group_impl.hpp"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <mutex>
#include <thread>

#include "comm/wrappers_testing.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

using namespace std::chrono_literals;
using isograd::testing::Inner;
using isograd::testing::MessagesOnly;
using isograd::testing::PassingOn;
using isograd::testing::run_over_shm;
using ::testing::HasSubstr;

enum class Fault { kNone, kDrops, kSwaps, kRounds, kReturnsEarly };
enum class Operation {
  kAllReduce,
  kReduce,
  kBroadcast,
  kAllGather,
  kReduceScatter,
  kGather,
  kScatter,
  kAllToAll,
  kMessages,
  kBarrier
};

// Does everything right except `operation`.
class Faulty final : public PassingOn {
 public:
  Faulty(Inner inner, Operation operation, Fault fault)
      : PassingOn(std::move(inner)), operation_(operation), fault_(fault) {}

  Works allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    if (!here(Operation::kAllReduce)) return PassingOn::allreduce(tensors, options);
    Tensors mine{tensors[0].clone()};
    if (fault_ == Fault::kDrops && rank_ == 1) mine[0].zero_();
    return spoiled(PassingOn::allreduce(mine, options), mine[0], tensors[0]);
  }
  Works reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    if (!here(Operation::kReduce)) return PassingOn::reduce(tensors, options);
    Tensors mine{tensors[0].clone()};
    if (fault_ == Fault::kDrops && rank_ == 1) mine[0].zero_();
    Works work = PassingOn::reduce(mine, options);
    return rank_ == options.rootRank ? spoiled(work, mine[0], tensors[0]) : work;
  }
  Works broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    if (!here(Operation::kBroadcast)) return PassingOn::broadcast(tensors, options);
    Tensors mine{tensors[0].clone()};
    if (fault_ == Fault::kDrops && rank_ == options.rootRank) mine[0].zero_();
    return spoiled(PassingOn::broadcast(mine, options), mine[0], tensors[0]);
  }
  Works _allgather_base(at::Tensor& output, at::Tensor& input,
                        const c10d::AllgatherOptions& options) override {
    if (!here(Operation::kAllGather)) return PassingOn::_allgather_base(output, input, options);
    at::Tensor mine = input.clone(), all = output.clone();
    if (fault_ == Fault::kDrops && rank_ == 1) mine.zero_();
    return spoiled(PassingOn::_allgather_base(all, mine, options), all, output);
  }
  Works _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                             const c10d::ReduceScatterOptions& options) override {
    if (!here(Operation::kReduceScatter)) return PassingOn::_reduce_scatter_base(output, input, options);
    at::Tensor mine = input.clone(), part = output.clone();
    if (fault_ == Fault::kDrops && rank_ == 1) mine.zero_();
    return spoiled(PassingOn::_reduce_scatter_base(part, mine, options), part, output);
  }
  Works gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    if (!here(Operation::kGather)) return PassingOn::gather(outputs, inputs, options);
    Tensors mine{inputs[0].clone()};
    if (fault_ == Fault::kDrops && rank_ == 1) mine[0].zero_();
    if (outputs.empty()) return PassingOn::gather(outputs, mine, options);
    Lists all{{}};
    for (const at::Tensor& output : outputs[0]) all[0].push_back(output.clone());
    Works work = PassingOn::gather(all, mine, options);
    work->wait();
    if (fault_ == Fault::kSwaps) std::swap(all[0][0], all[0][1]);
    for (std::size_t r = 0; r < all[0].size(); ++r) spoiled(work, all[0][r], outputs[0][r]);
    return work;
  }
  Works scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override {
    if (!here(Operation::kScatter)) return PassingOn::scatter(outputs, inputs, options);
    Lists all = inputs;
    if (!all.empty() && fault_ == Fault::kDrops) all[0][1] = at::zeros_like(all[0][1]);
    if (!all.empty() && fault_ == Fault::kSwaps) std::swap(all[0][0], all[0][1]);
    Tensors mine{outputs[0].clone()};
    return spoiled(PassingOn::scatter(mine, all, options), mine[0], outputs[0]);
  }
  Works alltoall_base(at::Tensor& output, at::Tensor& input, Splits& output_splits, Splits& input_splits,
                      const c10d::AllToAllOptions& options) override {
    if (!here(Operation::kAllToAll))
      return PassingOn::alltoall_base(output, input, output_splits, input_splits, options);
    at::Tensor mine = input.clone(), all = output.clone();
    if (fault_ == Fault::kDrops && rank_ == 1) mine.zero_();
    return spoiled(PassingOn::alltoall_base(all, mine, output_splits, input_splits, options), all, output);
  }
  Works send(Tensors& tensors, int to, int tag) override {
    if (!here(Operation::kMessages)) return PassingOn::send(tensors, to, tag);
    Tensors mine{tensors[0].clone()};
    if (fault_ == Fault::kDrops && rank_ == 1) mine[0].zero_();
    Works work = PassingOn::send(mine, to, tag);
    work->wait();
    return work;
  }
  Works recv(Tensors& tensors, int from, int tag) override {
    // The question before the barrier's, so that one rank is late for the barrier.
    if (here(Operation::kBarrier) && rank_ == size_ - 1) std::this_thread::sleep_for(50ms);
    if (!here(Operation::kMessages)) return PassingOn::recv(tensors, from, tag);
    Tensors mine{tensors[0].clone()};
    Works work = PassingOn::recv(mine, from, tag);
    return c10::make_intrusive<Late>(work, [this, mine, to = tensors[0]] { spoil(mine[0], to); });
  }
  Works barrier(const c10d::BarrierOptions& options) override {
    if (!here(Operation::kBarrier)) return PassingOn::barrier(options);
    return c10::make_intrusive<Late>(Works(), [] {});  // no rank waits for another
  }

 private:
  // A work that writes its result after wait().
  struct Late final : c10d::Work {
    Late(Works inner, std::function<void()> end) : inner_(std::move(inner)), end_(std::move(end)) {}
    bool wait(std::chrono::milliseconds) override {
      if (inner_) inner_->wait();
      if (end_) end_();
      end_ = nullptr;
      return true;
    }
    bool isCompleted() override { return wait(0ms); }
    Works inner_;
    std::function<void()> end_;
  };

  bool here(Operation operation) const { return operation == operation_ && fault_ != Fault::kNone; }

  void spoil(const at::Tensor& from, at::Tensor to) const {
    if (fault_ == Fault::kReturnsEarly) return;  // before anything has arrived
    at::Tensor result = from.view(-1);
    if (fault_ == Fault::kRounds && result.is_floating_point()) result = result.to(at::kBFloat16).to(from);
    if (fault_ == Fault::kSwaps && result.numel() > 1) result = result.flip(0);
    to.copy_(result.view(to.sizes()));
  }
  Works spoiled(Works work, const at::Tensor& from, const at::Tensor& to) const {
    work->wait();
    spoil(from, to);
    return work;
  }

  Operation operation_;
  Fault fault_;
};

// The messages with which the ranks refuse the group.
std::vector<std::string> refusals(int size, Operation operation, Fault fault) {
  std::vector<std::string> messages(static_cast<std::size_t>(size));
  run_over_shm(size, [&](const c10::intrusive_ptr<ShmBackend>& shm) {
    try {
      Group(c10::make_intrusive<Faulty>(shm, operation, fault), "faulty", 60s);
    } catch (const PeerError& error) {
      messages[static_cast<std::size_t>(shm->getRank())] = error.what();
    }
  });
  return messages;
}

TEST(SelfTest, NamesTheCollectiveThatIsWrongOnEveryRank) {
  const std::vector<std::pair<Operation, const char*>> operations = {
      {Operation::kAllReduce, "all_reduce(sum)"},
      {Operation::kReduce, "reduce(sum)"},
      {Operation::kBroadcast, "broadcast"},
      {Operation::kAllGather, "all_gather"},
      {Operation::kReduceScatter, "reduce_scatter(sum)"},
      {Operation::kGather, "gather"},
      {Operation::kScatter, "scatter"},
      {Operation::kAllToAll, "all_to_all"},
      {Operation::kMessages, "send and recv"}};
  for (const auto& [operation, name] : operations) {
    for (auto fault : {Fault::kDrops, Fault::kSwaps, Fault::kRounds, Fault::kReturnsEarly}) {
      for (const std::string& message : refusals(3, operation, fault)) {
        EXPECT_THAT(message, HasSubstr("self-test of group 'faulty' on rank"));
        EXPECT_THAT(message, HasSubstr(std::string("found ") + name + " gave "))
            << "fault " << static_cast<int>(fault);
        EXPECT_THAT(message, HasSubstr("; expected "));
      }
    }
  }
}

// Keeps the outputs that the first all_gather, gather and all_to_all are given. (Those of uneven rows may use
// scratch memory of the group.)
class FirstOutputs final : public PassingOn {
 public:
  using Outputs = std::map<Operation, at::Tensor>;
  FirstOutputs(Inner inner, Outputs& before) : PassingOn(std::move(inner)), before_(before) {}

  Works _allgather_base(at::Tensor& output, at::Tensor& input,
                        const c10d::AllgatherOptions& options) override {
    before_.try_emplace(Operation::kAllGather, output.clone());
    return PassingOn::_allgather_base(output, input, options);
  }
  Works gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    if (!outputs.empty()) before_.try_emplace(Operation::kGather, at::cat(outputs[0]));
    return PassingOn::gather(outputs, inputs, options);
  }
  Works alltoall_base(at::Tensor& output, at::Tensor& input, Splits& output_splits, Splits& input_splits,
                      const c10d::AllToAllOptions& options) override {
    before_.try_emplace(Operation::kAllToAll, output.clone());
    return PassingOn::alltoall_base(output, input, output_splits, input_splits, options);
  }

 private:
  Outputs& before_;
};

// A collective that does nothing would pass if its output already held the answer.
TEST(SelfTest, HandsOverOutputsThatAreNoAnswer) {
  std::vector<FirstOutputs::Outputs> before(3);
  run_over_shm(3, [&](const c10::intrusive_ptr<ShmBackend>& shm) {
    Group(c10::make_intrusive<FirstOutputs>(shm, before[static_cast<std::size_t>(shm->getRank())]), "seen",
          60s);
  });
  for (std::size_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(before[rank].size(), rank == 2 ? 3u : 2u) << "the last rank is the root";
    for (const auto& [operation, output] : before[rank])
      EXPECT_TRUE(output.eq(-1).all().item<bool>()) << static_cast<int>(operation) << "\n" << output;
  }
}

TEST(SelfTest, NoticesABarrierThatDoesNotWait) {
  for (const std::string& message : refusals(3, Operation::kBarrier, Fault::kReturnsEarly)) {
    EXPECT_THAT(message, HasSubstr("left the barrier"));
  }
}

TEST(SelfTest, PassesWhatIsRight) {
  for (int size : {1, 2, 3, 4, 5, 8}) {
    for (const std::string& message : refusals(size, Operation::kAllReduce, Fault::kNone)) {
      EXPECT_EQ(message, "");
    }
    run_over_shm(size, [](const c10::intrusive_ptr<ShmBackend>& shm) {
      Group(shm, "ours", 60s);
      Group(c10::make_intrusive<MessagesOnly>(shm), "messages", 60s);
    });
  }
}

// Not a benchmark: a bound that keeps the start fast.
TEST(SelfTest, TakesLittleTime) {
  double best = 1e9;
  std::mutex mutex;
  run_over_shm(4, [&](const c10::intrusive_ptr<ShmBackend>& shm) {
    Group group(shm, "timed", 60s, {.self_test = false});
    for (int round = 0; round < 100; ++round) {  // other processes may use the cores for a while
      group.barrier();
      const auto begin = std::chrono::steady_clock::now();
      self_test(group, at::kCPU);
      const auto took = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin);
      const std::lock_guard lock(mutex);
      best = std::min(best, took.count());
    }
  });
  RecordProperty("milliseconds", std::to_string(best));
  std::cout << "self-test of 4 ranks: " << best << " ms\n";
  EXPECT_LT(best, 50);  // 5 where the machine is not busy; sanitizers are slow
}

}  // namespace
}  // namespace isograd
