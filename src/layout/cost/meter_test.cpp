#include "layout/cost/meter.hpp"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <thread>

#include "base/account.hpp"

namespace isograd {
namespace {

TEST(MemoryMeter, CountsWhatIsAliveAndTheMostThatWas) {
  MemoryMeter meter;
  {
    const at::Tensor kept = at::zeros({1000});
    EXPECT_EQ(meter.alive(), 4000);
    { const at::Tensor passing = at::zeros({50}, at::kDouble); }
    EXPECT_EQ(meter.alive(), 4000);
    EXPECT_EQ(meter.peak(), 4400);
    meter.restart_peak();
    EXPECT_EQ(meter.peak(), 4000);
    count_shared(123);
    EXPECT_EQ(meter.shared(), 123);
  }
  EXPECT_EQ(meter.alive(), 0);
}

TEST(MemoryMeter, KeepsThreadsApart) {
  MemoryMeter mine;
  at::Tensor theirs;
  std::thread other([&] {
    const at::Tensor nobodys = at::zeros({7});
    MemoryMeter meter;
    theirs = at::zeros({100});
    EXPECT_EQ(meter.alive(), 400);
  });
  other.join();
  EXPECT_EQ(mine.alive(), 0);
  theirs = at::Tensor();  // freed here, by a thread that did not allocate it
  EXPECT_EQ(mine.alive(), 0);
  const at::Tensor x = at::ones({64, 64}).requires_grad_(true);
  const std::int64_t before = mine.alive();
  (x * x).sum().backward();  // this thread's, gradient included
  EXPECT_GE(mine.alive() - before, 64 * 64 * 4);
  EXPECT_GE(mine.peak() - before, 2 * 64 * 64 * 4);
}

}  // namespace
}  // namespace isograd
