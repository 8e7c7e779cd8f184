// Buffers with more bytes than a 32-bit number counts: in place and through staging, collectives and
// messages. With ISOGRAD_FULL_TESTS=1 they exceed 2^31 bytes; otherwise the same runs with a few chunks of
// staging.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "comm/group_testing.hpp"
#include "comm/shm/segment.hpp"
#include "full_tests.hpp"
#include "isograd/world.hpp"

namespace isograd {
namespace {

// A prime: no power of two is a multiple of the period, so a wrapped offset is detected.
constexpr std::int64_t kPeriod = 251;
constexpr std::int64_t kSlice = kPeriod << 18;  // compared at once, to keep the test's own memory small
constexpr int kLargeBufferRanks = 2;

std::int64_t buffer_bytes() { return (full_tests() ? std::int64_t{1} << 31 : std::int64_t{1} << 21) + 64; }

// Byte i of rank r's data: (i mod 251) / 2 + r, so that two ranks' sum does not overflow.
at::Tensor pattern(int rank, std::int64_t first, std::int64_t numel) {
  const at::Tensor period = at::arange(kPeriod, at::kLong).div(2, "floor").add(rank).to(at::kByte);
  const std::int64_t start = first % kPeriod;
  return period.repeat({(start + numel) / kPeriod + 1}).narrow(0, start, numel);
}

void fill(const at::Tensor& tensor, int rank) {
  for (std::int64_t begin = 0; begin < tensor.numel(); begin += kSlice) {
    const std::int64_t n = std::min(kSlice, tensor.numel() - begin);
    tensor.narrow(0, begin, n).copy_(pattern(rank, begin, n));
  }
}

// Whether byte i equals element i of `expected(first, numel)`, counted from `first`.
template <typename Expected>
bool holds(const at::Tensor& tensor, std::int64_t first, Expected&& expected) {
  for (std::int64_t begin = 0; begin < tensor.numel(); begin += kSlice) {
    const std::int64_t n = std::min(kSlice, tensor.numel() - begin);
    if (!at::equal(tensor.narrow(0, begin, n), expected(first + begin, n))) return false;
  }
  return true;
}

at::Tensor sum(std::int64_t first, std::int64_t numel) {
  return pattern(0, first, numel).add(pattern(1, first, numel));
}

class LargeBuffers : public ::testing::TestWithParam<bool> {};  // in shared memory?

TEST_P(LargeBuffers, AreReducedScatteredBroadcastAndSent) {
  const bool shared = GetParam();
  const std::int64_t bytes = buffer_bytes(), half = bytes / kLargeBufferRanks;
  const std::uint64_t needed = static_cast<std::uint64_t>(bytes) * kLargeBufferRanks * 2;
  if (const auto available = shm::available_memory(); available < needed)
    GTEST_SKIP() << "missing: memory (" << available << " bytes available, " << needed << " needed)";
  run_ranks(kLargeBufferRanks, [&](World& world) {
    const at::Tensor tensor =
        shared ? world.group.empty_shared(bytes, at::kByte) : at::empty(bytes, at::kByte);
    fill(tensor, world.rank);
    {
      const at::Tensor output = at::empty(half, at::kByte);
      world.group.reduce_scatter_async(output, tensor).wait();
      EXPECT_TRUE(holds(output, half * world.rank, sum)) << "reduce-scatter";
    }
    if (world.rank == 0) {
      world.group.send(tensor, 1);
    } else {
      world.group.recv(tensor, 0);
    }
    const auto of_first = [](std::int64_t first, std::int64_t n) { return pattern(0, first, n); };
    EXPECT_TRUE(holds(tensor, 0, of_first)) << "send and receive";
    fill(tensor, world.rank);
    world.group.all_reduce(tensor);
    EXPECT_TRUE(holds(tensor, 0, sum)) << "all-reduce";
    fill(tensor, world.rank);
    world.group.broadcast(tensor, 0);
    EXPECT_TRUE(holds(tensor, 0, of_first)) << "broadcast";
    // The check detects a wrong byte beyond 31 bits.
    if (world.rank == 0) tensor[bytes - 3].add_(1);
    EXPECT_EQ(holds(tensor, 0, of_first), world.rank != 0) << "a wrong byte near the end";
  });
}

INSTANTIATE_TEST_SUITE_P(SharedMemory, LargeBuffers, ::testing::Bool());

}  // namespace
}  // namespace isograd
