#include "kernels/threads/parallel_for.hpp"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

namespace isograd {
namespace {

class ParallelFor : public ::testing::Test {
 protected:
  void TearDown() override { at::set_num_threads(before_); }

 private:
  const int before_ = at::get_num_threads();
};

TEST_F(ParallelFor, EveryPlaceOnceInPartsOfAtLeastTheGrain) {
  for (const int threads : {1, 2, 3, 5}) {
    at::set_num_threads(threads);
    for (const std::int64_t begin : {0, 7})
      for (const std::int64_t count : {0, 1, 2, 3, 4, 7, 100, 101})
        for (const std::int64_t grain : {0, 1, 3, 50, 1000}) {
          std::vector<int> seen(static_cast<std::size_t>(count));
          std::vector<std::int64_t> sizes;
          std::mutex mutex;
          parallel_for(begin, begin + count, grain, [&](std::int64_t from, std::int64_t to) {
            const std::lock_guard lock(mutex);
            sizes.push_back(to - from);
            for (std::int64_t i = from; i < to; ++i) ++seen[static_cast<std::size_t>(i - begin)];
          });
          EXPECT_EQ(seen, std::vector<int>(static_cast<std::size_t>(count), 1));
          EXPECT_LE(std::ssize(sizes), threads);
          for (const std::int64_t size : sizes)
            EXPECT_TRUE(size >= grain || sizes.size() == 1) << size << " of " << count << ", grain " << grain;
        }
  }
}

// All parts run at once: each waits until the others have started.
TEST_F(ParallelFor, PartsRunAtTheSameTime) {
  constexpr std::size_t kThreads = 3;
  at::set_num_threads(kThreads);
  std::set<std::thread::id> threads;
  std::mutex mutex;
  std::condition_variable another;
  std::atomic<int> met{0};
  parallel_for(0, 30, 1, [&](std::int64_t, std::int64_t) {
    std::unique_lock lock(mutex);
    threads.insert(std::this_thread::get_id());
    another.notify_all();
    met += another.wait_for(lock, std::chrono::seconds(20), [&] { return threads.size() == kThreads; });
  });
  EXPECT_EQ(met, kThreads);
}

TEST_F(ParallelFor, ALoopInALoopRunsInOrder) {
  at::set_num_threads(3);
  std::vector<std::vector<std::int64_t>> inner(3);
  parallel_for(0, 3, 1, [&](std::int64_t part, std::int64_t) {
    parallel_for(0, 9, 1, [&](std::int64_t from, std::int64_t to) {
      for (std::int64_t i = from; i < to; ++i) inner[static_cast<std::size_t>(part)].push_back(i);
    });
  });
  for (const auto& each : inner) EXPECT_EQ(each, (std::vector<std::int64_t>{0, 1, 2, 3, 4, 5, 6, 7, 8}));
}

TEST_F(ParallelFor, WhatAPartThrowsArrives) {
  at::set_num_threads(3);
  EXPECT_THROW(parallel_for(0, 3, 1,
                            [&](std::int64_t from, std::int64_t) {
                              if (from == 2) throw std::runtime_error("the third part");
                            }),
               std::runtime_error);
}

}  // namespace
}  // namespace isograd
