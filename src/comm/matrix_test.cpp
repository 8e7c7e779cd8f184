// The correctness matrix: every operation × type × size × ranks × memory × form, over the shared-memory
// backend and over a foreign backend. Complete with ISOGRAD_FULL_TESTS=1; otherwise memory and form alternate
// from 4 ranks on, and the largest size is smaller.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <mutex>

#include "comm/group_testing.hpp"
#include "comm/wrappers_testing.hpp"
#include "full_tests.hpp"
#include "isograd/world.hpp"

namespace isograd {
namespace {

using namespace std::chrono_literals;
using isograd::full_tests;
using isograd::testing::check_operations;
using isograd::testing::OperationCases;
using isograd::testing::PassingOn;
using isograd::testing::run_over_shm;

void expect_none(const std::vector<std::string>& failures) {
  for (std::size_t i = 0; i < failures.size() && i < 5; ++i) ADD_FAILURE() << failures[i];
  EXPECT_EQ(failures.size(), 0u);
}

class Matrix : public ::testing::TestWithParam<int> {};

TEST_P(Matrix, SharedMemory) {
  run_ranks(GetParam(),
            [](World& world) { expect_none(check_operations(world.group, {.every_layout = full_tests()})); });
}

TEST_P(Matrix, ForeignBackend) {
  run_over_shm(GetParam(), [](const c10::intrusive_ptr<ShmBackend>& shm) {
    OperationCases cases{.every_layout = full_tests()};
    if (!full_tests()) cases.dtypes = {at::kFloat, at::kBFloat16, at::kLong, at::kBool};
    expect_none(check_operations(Group(c10::make_intrusive<PassingOn>(shm), "foreign", 60s), cases));
  });
}

// Several chunks of staging, and a size that is no multiple of anything.
TEST(MatrixOfLargeTensors, SharedMemory) {
  const std::int64_t numel = full_tests() ? (1 << 20) + 3 : (1 << 17) + 3;
  for (int size : full_tests() ? std::vector<int>{2, 3, 4} : std::vector<int>{3}) {
    run_ranks(size, [&](World& world) {
      expect_none(check_operations(
          world.group, {.numels = {numel}, .dtypes = {at::kFloat}, .every_layout = full_tests()}));
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, Matrix, ::testing::Values(1, 2, 3, 4, 5, 8));

// Planted fault: a backend that corrupts one operation is detected.
class FlipsGather final : public PassingOn {
 public:
  using PassingOn::PassingOn;
  Works gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    Works work = PassingOn::gather(outputs, inputs, options);
    work->wait();
    if (!outputs.empty()) outputs[0][0].copy_(outputs[0][1].clone());
    return work;
  }
};

TEST(MatrixItself, NoticesAPlantedFault) {
  std::mutex mutex;
  std::vector<std::string> all;
  run_over_shm(2, [&](const c10::intrusive_ptr<ShmBackend>& shm) {
    Group group(c10::make_intrusive<FlipsGather>(shm), "planted", 60s, {.self_test = false});
    const auto failures =
        check_operations(group, {.numels = {7}, .dtypes = {at::kFloat}, .every_layout = true});
    const std::lock_guard lock(mutex);
    all.insert(all.end(), failures.begin(), failures.end());
  });
  EXPECT_EQ(all.size(), 8u);  // each layout, on the root alone
  for (const std::string& failure : all) EXPECT_EQ(failure.find("gather of 7 x Float"), 0u) << failure;
}

}  // namespace
}  // namespace isograd
