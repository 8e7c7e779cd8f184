// Every operation of Group on thread ranks: values encode (rank, operation, index), so that a permutation, a
// lost chunk or a stale buffer cannot pass.
#include "isograd/group.hpp"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/shm/backend.hpp"
#include "isograd/error.hpp"
#include "isograd/world.hpp"

namespace isograd {
namespace {

using testing::HasSubstr;

const std::vector<int> kSizes = {1, 2, 3, 4, 5, 8};
const std::vector<std::int64_t> kNumels = {0, 1, 7, 1000, (1 << 20) + 3};
const std::vector<at::ScalarType> kNumbers = {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf,
                                              at::kLong,   at::kInt,   at::kByte};

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

// The whole matrix would take minutes: large sizes with two types, all types with small sizes.
std::vector<std::int64_t> numels_for(at::ScalarType dtype, int size) {
  auto numels = kNumels;
  if ((dtype != at::kFloat && dtype != at::kBFloat16) || size > 4) numels.pop_back();
  return numels;
}

TEST(AllReduce, CombinesOrdinaryTensorsOfEveryTypeAndSize) {
  for (int size : kSizes) {
    run_ranks(size, [&](World& world) {
      int slot = 0;
      for (auto dtype : kNumbers) {
        for (auto numel : numels_for(dtype, size)) {
          for (auto op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin}) {
            at::Tensor tensor = encode(world.rank, ++slot, numel, dtype);
            world.group.all_reduce(tensor, op);
            ASSERT_TRUE(at::equal(tensor, combined(size, slot, numel, dtype, op)))
                << size << " ranks, rank " << world.rank << ", " << dtype << " x " << numel;
          }
        }
      }
    });
  }
}

TEST(AllReduce, CombinesSharedBuffersInPlace) {
  for (int size : kSizes) {
    run_ranks(size, [&](World& world) {
      int slot = 0;
      for (auto dtype : kNumbers) {
        for (auto numel : numels_for(dtype, size)) {
          at::Tensor buffer = world.group.empty_shared(numel, dtype);
          ASSERT_EQ(buffer.numel(), numel);
          ASSERT_EQ(buffer.count_nonzero().item<std::int64_t>(), 0);
          const void* place = buffer.data_ptr();
          for (int round = 0; round < 2; ++round) {  // the same buffer again: nobody may still be in it
            buffer.copy_(encode(world.rank, ++slot, numel, dtype));
            world.group.all_reduce(buffer);
            ASSERT_TRUE(at::equal(buffer, combined(size, slot, numel, dtype, ReduceOp::kSum)))
                << size << " ranks, rank " << world.rank << ", " << dtype << " x " << numel;
          }
          ASSERT_EQ(buffer.data_ptr(), place);
        }
      }
    });
  }
}

}  // namespace
}  // namespace isograd
