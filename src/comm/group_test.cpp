// Group on thread ranks: many operations at once, memory of every kind, bad arguments (matrix_test has every
// operation of every type and size). Values encode (rank, operation, index), so that a permutation, a lost
// chunk or a stale buffer is detected.
#include "isograd/group.hpp"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "base/error_testing.hpp"
#include "comm/shm/backend.hpp"
#include "isograd/error.hpp"
#include "isograd/world.hpp"

namespace isograd {
namespace {

using ::testing::HasSubstr;

const std::vector<int> kSizes = {1, 2, 3, 4, 5, 8};

// Small whole numbers: sums over eight ranks are exact in every type (8 * 15 < 128).
at::Tensor encode(int rank, int slot, std::int64_t numel, at::ScalarType dtype) {
  return at::arange(numel, at::kLong).mul(7).add(rank * 5 + slot * 3).remainder(16).to(dtype);
}

at::Tensor combined(int size, int slot, std::int64_t numel, at::ScalarType dtype, ReduceOp op) {
  at::Tensor result = encode(0, slot, numel, dtype);
  for (int r = 1; r < size; ++r) {
    const at::Tensor next = encode(r, slot, numel, dtype);
    result = op == ReduceOp::kSum   ? result + next
             : op == ReduceOp::kMax ? at::maximum(result, next)
                                    : at::minimum(result, next);
  }
  return result;
}

TEST(AllReduce, ViewsOfSharedBuffersAndMixturesWork) {
  for (int size : {2, 3, 5}) {
    run_ranks(size, [&](World& world) {
      at::Tensor buffer = world.group.empty_shared(5000, at::kFloat);
      buffer.fill_(-1);
      // A different place in the buffer on each rank; then one rank without shared memory.
      at::Tensor view = buffer.narrow(0, 7 * world.rank, 4001);
      view.copy_(encode(world.rank, 1, 4001, at::kFloat));
      world.group.all_reduce(view);
      ASSERT_TRUE(at::equal(view, combined(size, 1, 4001, at::kFloat, ReduceOp::kSum)));
      ASSERT_EQ(buffer.eq(-1).sum().item<int>(), 5000 - 4001) << "nothing outside the view is touched";
      at::Tensor mixed = world.rank == 1 ? at::empty({4001}) : view;
      mixed.copy_(encode(world.rank, 2, 4001, at::kFloat));
      world.group.all_reduce(mixed);
      ASSERT_TRUE(at::equal(mixed, combined(size, 2, 4001, at::kFloat, ReduceOp::kSum)));
    });
  }
}

TEST(AllReduce, ManyAtOnceWithWorkBetweenAndWaitsInAnyOrder) {
  for (int size : {2, 4}) {
    run_ranks(size, [&](World& world) {
      constexpr int kBuffers = 150;  // more than may be under way, so the rest queue
      std::vector<at::Tensor> tensors;
      std::vector<Pending> pending;
      for (int i = 0; i < kBuffers; ++i) {
        const std::int64_t numel = 1 + 97 * (i % 13);
        tensors.push_back(i % 3 == 0 ? at::empty({numel}) : world.group.empty_shared(numel, at::kFloat));
        tensors.back().copy_(encode(world.rank, i, numel, at::kFloat));
      }
      for (int i = 0; i < kBuffers; ++i) {
        pending.push_back(world.group.all_reduce_async(tensors[i]));
        if (i % 5 == world.rank) std::this_thread::sleep_for(std::chrono::microseconds(200));
        pending[i / 2].progress();
      }
      // Forwards on one rank, backwards on another: waiting for one must advance all.
      for (int i = 0; i < kBuffers; ++i) pending[world.rank % 2 ? i : kBuffers - 1 - i].wait();
      for (int i = 0; i < kBuffers; ++i) {
        ASSERT_TRUE(pending[i].progress());
        ASSERT_TRUE(at::equal(tensors[i], combined(size, i, tensors[i].numel(), at::kFloat, ReduceOp::kSum)))
            << i;
      }
    });
  }
}

TEST(AllGather, OfScalarsAndOfEmptyTensorsHasTheirShape) {
  for (int size : kSizes)
    run_ranks(size, [&](World& world) {
      ASSERT_EQ(world.group.all_gather(at::full({}, world.rank)).sizes(), (std::vector<std::int64_t>{size}));
      ASSERT_EQ(world.group.all_gather(at::zeros({2, 0, 3})).sizes(),
                (std::vector<std::int64_t>{size, 2, 0, 3}));
    });
}

TEST(Barrier, NobodyPassesBeforeAllHaveCome) {
  for (int size : {2, 5}) {
    std::atomic<int> arrived{0};
    run_ranks(size, [&](World& world) {
      for (int round = 1; round <= 200; ++round) {
        ++arrived;
        world.group.barrier();
        ASSERT_GE(arrived.load(), round * size);
        world.group.barrier();
      }
    });
  }
}

TEST(Group, OfOneRankIsTheIdentity) {
  Group group = Group::solo();
  EXPECT_EQ(group.rank(), 0);
  EXPECT_EQ(group.size(), 1);
  at::Tensor tensor = at::arange(5);
  group.all_reduce(tensor);
  Pending pending = group.all_reduce_async(tensor, ReduceOp::kMax);
  EXPECT_TRUE(pending.progress());
  pending.wait();
  group.broadcast(tensor, 0);
  group.barrier();
  group.poison("nobody listens");
  EXPECT_TRUE(at::equal(tensor, at::arange(5)));
  EXPECT_EQ(group.all_gather(tensor).sizes(), (std::vector<std::int64_t>{1, 5}));
  EXPECT_EQ(group.empty_shared(4, at::kFloat).sum().item<float>(), 0);
}

TEST(Group, TwoGroupsAtOnceDoNotMeet) {
  run_ranks(2, [](World& world) {
    static auto store = c10::make_intrusive<c10d::HashStore>();
    const auto timeout = std::chrono::seconds(60);
    Group other(c10::make_intrusive<ShmBackend>(store, 1 - world.rank, 2, "other", timeout), "other",
                timeout);
    at::Tensor a = world.group.empty_shared(1000, at::kFloat), b = other.empty_shared(1000, at::kFloat);
    for (int round = 0; round < 50; ++round) {
      a.fill_(1 + world.rank);
      b.fill_(10 + world.rank);
      // Started in a different order on each rank.
      Pending first, second;
      if (world.rank == 0) first = world.group.all_reduce_async(a);
      second = other.all_reduce_async(b);
      if (world.rank == 1) first = world.group.all_reduce_async(a);
      // Waited for in a different order: a rank that waits in one group must advance the other too.
      if (world.rank == 0) first.wait();
      second.wait();
      first.wait();
      ASSERT_EQ(a[500].item<float>(), 3);
      ASSERT_EQ(b[500].item<float>(), 21);
    }
  });
}

TEST(Group, BadArgumentsAreConfigErrors) {
  for (int size : {1, 2}) {
    run_ranks(size, [&](World& world) {
      Group& group = world.group;
      const std::string last = std::to_string(size - 1);
      const at::Tensor x = at::ones({4, 2});
      const auto expect = [](const std::string& part, const std::function<void()>& call) {
        EXPECT_THAT(error_testing::error_of(call), HasSubstr(part));
      };
      expect("an undefined tensor", [&] { group.all_reduce(at::Tensor()); });
      expect("a sparse tensor", [&] { group.all_reduce(x.to_sparse()); });
      expect("of ComplexFloat", [&] { group.all_reduce(at::ones({4}, at::kComplexFloat)); });
      expect("one place divides", [&] { group.all_reduce(x, ReduceOp::kAverage); });
      expect("reduction number 77", [&] { group.reduce(x, 0, static_cast<ReduceOp>(77)); });
      expect("found root " + std::to_string(size), [&] { group.broadcast(x, size); });
      expect("expected 0 to " + last, [&] { group.reduce(x, -1); });
      expect("found root -1", [&] { group.gather(x, -1); });
      expect("found root 9", [&] { group.scatter(x, x, 9); });
      expect("an output [4, 2] of Float; expected [" + std::to_string(size) + ", 4, 2] of Float",
             [&] { group.all_gather_async(x, x); });
      expect("of Double", [&] { group.all_gather_async(at::ones({size, 4, 2}, at::kDouble), x); });
      expect("an input without dimensions", [&] { group.reduce_scatter(at::ones({})); });
      expect("rows [1, 1, 9] for 4 rows", [&] {
        group.reduce_scatter_async(x, x, ReduceOp::kSum, {1, 1, 9});
      });
      expect("expected [" + std::to_string(4 / size), [&] {
        group.reduce_scatter_async(at::ones({3, 2}), x);
      });
      expect("rows [-1] for 4 rows", [&] { group.all_gather_rows_async(x, x, {-1}); });
      expect("as the given rows say", [&] {
        group.all_gather_rows_async(x, at::ones({3, 2}), size == 1 ? Group::Rows{4} : Group::Rows{2, 2});
      });
      expect("rows [9] for 4 rows", [&] { group.all_to_all(x, split_rows(4, size), Group::Rows{9}); });
      expect("an output [4, 3] of Float", [&] { group.all_to_all_async(at::ones({4, 3}), x); });
      expect("as the other end", [&] { group.send(x, world.rank); });
      expect("rank 5 as the other end", [&] { group.recv(x, 5); });
      expect("at group_test.cpp:", [&] { group.recv(x, 5); });
      if (size == 2) {
        expect("tag -1", [&] { group.send(x, 1 - world.rank, -1); });
        expect("3 rows without numbers of rows", [&] { group.all_to_all(at::ones({3})); });
        expect("elements share memory", [&] { group.all_reduce(at::ones({1}).expand({5})); });
        expect("to this rank itself", [&] {
          group.all_to_all(x, Group::Rows{2, 2}, world.rank ? Group::Rows{3, 1} : Group::Rows{1, 3});
        });
      }
      group.barrier();  // none of these reached the others
    });
  }
  EXPECT_THROW(Group({}, "empty", std::chrono::seconds(1)), ConfigError);
  EXPECT_THROW(split_rows(-1, 2), ConfigError);
  EXPECT_THROW(split_rows(3, 0), ConfigError);
}

// A backend that returns at once, so the time that remains is Group's own.
class Idle final : public c10d::Backend {
 public:
  Idle() : c10d::Backend(0, 2) { work_->finish_now(); }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>&, const c10d::AllreduceOptions&) override {
    return work_;
  }

 private:
  struct Done final : c10d::Work {
    void finish_now() { finish(); }
    bool wait(std::chrono::milliseconds) override { return true; }
  };
  c10::intrusive_ptr<Done> work_ = c10::make_intrusive<Done>();
};

TEST(Group, AddsLittleToTheBackendsOwnCall) {
  const auto backend = c10::make_intrusive<Idle>();
  Group group(backend, "idle", std::chrono::seconds(1), {.self_test = false});
  const at::Tensor tensor = at::ones({4});
  const auto nanoseconds = [](const std::function<void()>& hundred_calls) {
    double best = 1e9;
    for (int round = 0; round < 200; ++round) {
      const auto begin = std::chrono::steady_clock::now();
      hundred_calls();
      const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
      best = std::min(best, took.count() / 100);
    }
    return best;
  };
  const double direct = nanoseconds([&] {
    for (int i = 0; i < 100; ++i) {
      std::vector<at::Tensor> tensors{tensor};
      backend->allreduce(tensors, c10d::AllreduceOptions())->wait(std::chrono::milliseconds(1));
    }
  });
  const double blocking = nanoseconds([&] {
    for (int i = 0; i < 100; ++i) group.all_reduce(tensor);
  });
  const double later = nanoseconds([&] {
    for (int i = 0; i < 100; ++i) group.all_reduce_async(tensor).wait();
  });
  std::cout << "the backend alone " << direct << " ns, all_reduce " << blocking << " ns, all_reduce_async "
            << later << " ns\n";
  EXPECT_LT(blocking - direct, 3000);  // 300 where the machine is not busy; sanitizers are slow
  EXPECT_LT(later - direct, 5000);
}

TEST(SplitRows, IsAsEvenAsPossibleFirstOnesFirst) {
  EXPECT_EQ(split_rows(7, 3), (std::vector<std::int64_t>{3, 2, 2}));
  EXPECT_EQ(split_rows(2, 4), (std::vector<std::int64_t>{1, 1, 0, 0}));
  EXPECT_EQ(split_rows(0, 2), (std::vector<std::int64_t>{0, 0}));
}

}  // namespace
}  // namespace isograd
