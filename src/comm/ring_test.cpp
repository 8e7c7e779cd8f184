// The ring over a backend that has send and receive only, against closed forms and its cost model.
#include "comm/ring.hpp"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/wrappers_testing.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

using namespace std::chrono_literals;
using isograd::testing::MessagesOnly;
using isograd::testing::run_over_shm;
using ::testing::HasSubstr;

const std::vector<int> kRingSizes = {1, 2, 3, 4, 5, 8};

// Small whole numbers: sums over eight ranks are exact in every type (8 * 15 < 128).
at::Tensor encode(int rank, std::int64_t numel, at::ScalarType dtype) {
  return at::arange(numel, at::kLong).mul(7).add(rank * 5).remainder(16).to(dtype);
}

at::Tensor combined(int size, std::int64_t numel, at::ScalarType dtype, ReduceOp op) {
  at::Tensor result = encode(0, numel, dtype);
  for (int r = 1; r < size; ++r) {
    const at::Tensor next = encode(r, numel, dtype);
    result = op == ReduceOp::kSum       ? result + next
             : op == ReduceOp::kProduct ? result * next
             : op == ReduceOp::kMax     ? at::maximum(result, next)
                                        : at::minimum(result, next);
  }
  return result;
}

// `body` on a group that has nothing but messages, and on the counting backend below it.
void run_with_messages(int size, const std::function<void(Group&, MessagesOnly&)>& body) {
  run_over_shm(size, [&](const c10::intrusive_ptr<ShmBackend>& shm) {
    auto backend = c10::make_intrusive<MessagesOnly>(shm);
    Group group(backend, "messages", 60s, {.self_test = false});
    body(group, *backend);
  });
}

TEST(Ring, CombinesAndGathersWhateverTheSegments) {
  for (int size : kRingSizes) {
    run_with_messages(size, [&](Group& group, MessagesOnly&) {
      for (auto dtype : {at::kFloat, at::kInt, at::kBool}) {
        for (std::int64_t numel : {0, 1, 7, 1000}) {
          for (std::int64_t segment_bytes : {1, 24, 1 << 18}) {
            if (numel == 1000 && segment_bytes == 1) continue;
            const at::Tensor input = encode(group.rank(), numel, dtype);
            for (auto op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin, ReduceOp::kProduct}) {
              at::Tensor tensor = input.clone();
              ring_all_reduce(group, tensor, op, segment_bytes);
              ASSERT_TRUE(at::equal(tensor, combined(size, numel, dtype, op)))
                  << size << " ranks, " << dtype << " x " << numel << " in " << segment_bytes;
            }
            const at::Tensor part = ring_reduce_scatter(group, input, ReduceOp::kSum, segment_bytes);
            const auto parts =
                combined(size, numel, dtype, ReduceOp::kSum).split_with_sizes(split_rows(numel, size));
            ASSERT_TRUE(at::equal(part, parts[static_cast<std::size_t>(group.rank())]));
            ASSERT_TRUE(at::equal(input, encode(group.rank(), numel, dtype))) << "the input is read only";
            const at::Tensor all = ring_all_gather(group, input, segment_bytes);
            for (int r = 0; r < size; ++r) ASSERT_TRUE(at::equal(all[r], encode(r, numel, dtype)));
          }
        }
      }
    });
  }
}

TEST(Ring, RoundsSumsOf16BitFloatsOnce) {
  run_with_messages(5, [](Group& group, MessagesOnly&) {
    at::Tensor tensor = at::full({40}, group.rank() == 0 ? 256 : 1, at::kBFloat16);
    ring_all_reduce(group, tensor, ReduceOp::kSum, 8);
    EXPECT_TRUE(tensor.eq(260).all().item<bool>()) << "in bf16 steps 256 + 1 = 256";
  });
}

// Not timed: what travels is exactly what the model says.
TEST(Ring, SendsTheMessagesAndBytesOfTheModel) {
  for (int size : kRingSizes) {
    run_with_messages(size, [&](Group& group, MessagesOnly& backend) {
      for (std::int64_t numel : {0, 1, 7, 1000, 120 * 8 * 5}) {
        for (auto dtype : {at::kFloat, at::kBFloat16, at::kByte}) {
          for (std::int64_t segment_bytes : {64, 1 << 18}) {
            const RingTraffic expected =
                ring_all_reduce_traffic(group.rank(), size, numel, dtype, ReduceOp::kSum, segment_bytes);
            backend.messages = backend.bytes = 0;
            ring_all_reduce(group, at::zeros({numel}, dtype), ReduceOp::kSum, segment_bytes);
            EXPECT_EQ(backend.messages, expected.messages) << size << " ranks, " << dtype << " x " << numel;
            EXPECT_EQ(backend.bytes, expected.bytes) << size << " ranks, " << dtype << " x " << numel;
          }
        }
      }
    });
  }
}

TEST(Ring, CostIsTheTextbooks) {
  const LinkCost link{.seconds_per_message = 2e-6, .bytes_per_second = 5e9};
  for (int n : {2, 3, 4, 8}) {
    const std::int64_t numel = 24'000;  // each rank has a part of the same size, in one segment
    const RingTraffic traffic = ring_all_reduce_traffic(0, n, numel, at::kFloat, ReduceOp::kSum, 1 << 30);
    const double bytes = 4.0 * static_cast<double>(numel);
    EXPECT_EQ(traffic.messages, 2 * (n - 1));
    EXPECT_DOUBLE_EQ(predicted_seconds(traffic, link),
                     2.0 * (n - 1) * 2e-6 + 2.0 * (n - 1) / n * bytes / 5e9);
  }
}

TEST(Ring, MeasuresItsLinks) {
  run_over_shm(3, [](const c10::intrusive_ptr<ShmBackend>& shm) {
    Group group(shm, "links", 60s, {.self_test = false});
    const LinkCost link = measure_link(group, 1 << 16, 5);
    EXPECT_GT(link.seconds_per_message, 0);
    EXPECT_LT(link.seconds_per_message, 10);
    EXPECT_GT(link.bytes_per_second, 0);
    EXPECT_THROW(measure_link(group, 8), ConfigError);
    EXPECT_THROW(measure_link(Group::solo()), ConfigError);
  });
}

// Asynchronous collectives of a ring group move by progress() alone, and wait in any order.
TEST(RingGroup, ProgressAloneCompletesAndOrderDoesNotMatter) {
  run_over_shm(3, [](const c10::intrusive_ptr<ShmBackend>& shm) {
    Group group(c10::make_intrusive<MessagesOnly>(shm), "ring", 60s, {.self_test = false, .ring = true});
    at::Tensor a = at::full({100'000}, group.rank() + 1.0), b = at::full({7}, group.rank(), at::kLong);
    Pending first = group.all_reduce_async(a), second = group.broadcast_async(b, 2);
    if (group.rank() == 1) second.wait();
    while (!first.progress()) std::this_thread::yield();
    second.wait();
    EXPECT_TRUE(a.eq(6).all().item<bool>());
    EXPECT_TRUE(b.eq(2).all().item<bool>());
  });
}

TEST(RingGroup, WithoutItAMissingCollectiveIsAConfigErrorThatNamesIt) {
  run_with_messages(2, [](Group& group, MessagesOnly&) {
    try {
      group.all_reduce(at::ones({3}));
      ADD_FAILURE() << "messages cannot do that";
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), HasSubstr("all_reduce of group 'messages' on rank"));
      EXPECT_THAT(error.what(), HasSubstr("GroupOptions::ring"));
    }
  });
}

}  // namespace
}  // namespace isograd
