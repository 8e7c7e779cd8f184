// A reduce-scatter that squares what it writes: staged in many chunks or in shared memory, of every type.
#include "comm/squares.hpp"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <barrier>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/shm/backend.hpp"
#include "isograd/world.hpp"
#include "kernels/flat.hpp"

namespace isograd {
namespace {

using namespace std::chrono_literals;

constexpr at::ScalarType kTypes[] = {at::kDouble, at::kFloat, at::kBFloat16};

// In runs that start at the output's start, as in squared_norm(), whatever the chunks were.
double squares_by_runs(const at::Tensor& output) {
  double sum = 0;
  for (std::int64_t at = 0; at < output.numel(); at += kernels::kSquaresRun) {
    const at::Tensor run = output.narrow(0, at, std::min(kernels::kSquaresRun, output.numel() - at));
    const void* values = run.const_data_ptr();
    sum += run.scalar_type() == at::kDouble
               ? kernels::squared_norm(static_cast<const double*>(values), run.numel())
           : run.scalar_type() == at::kFloat
               ? kernels::squared_norm(static_cast<const float*>(values), run.numel())
               : kernels::squared_norm(static_cast<const kernels::Bfloat16*>(values), run.numel());
  }
  return sum;
}

// Fills `input` and reduces it. Compares the bits of the squares, and their value by independent code.
void expect_squares(ShmBackend& backend, const at::Tensor& input, std::int64_t count, bool in_place) {
  const int rank = backend.getRank();
  input.copy_(at::sin(at::arange(input.numel(), at::kDouble) * 0.37 + rank));
  const at::Tensor output =
      in_place ? input.narrow(0, rank * count, count) : at::empty({count}, input.options());
  const auto squares = std::make_shared<double>(-1);
  backend.reduce_scatter_with_squares(output, input, squares, 30s)->wait();
  ASSERT_EQ(*squares, squares_by_runs(output)) << input.scalar_type() << " " << count;
  const double plain = output.to(at::kDouble).square().sum().item<double>();
  // Two orders of adding `count` non-negative numbers.
  ASSERT_NEAR(*squares, plain, plain * static_cast<double>(count) * 0x1p-52) << input.scalar_type();
  std::vector<at::Tensor> meet = {at::zeros({1})};  // no rank writes what others still read
  backend.allreduce(meet)->wait();
}

TEST(Squares, AreThoseOfTheOutput) {
  for (const int size : {2, 3, 5, 8})
    for (const bool small : {true, false}) {
      shm::EngineOptions options;
      if (small) options = {.chunk_bytes = 320, .chunks = 2, .ring_bytes = 128};
      auto store = c10::make_intrusive<c10d::HashStore>();
      run_ranks(size, [&](World& world) {
        auto backend = c10::make_intrusive<ShmBackend>(store, world.rank, size, "b", 30s, options);
        for (const at::ScalarType type : kTypes)
          for (const std::int64_t count : {0, 1, 77, 400, 40'000}) {
            if (small && count > 400) continue;
            const at::Tensor shared = backend->empty_shared(size * count, type);
            for (const at::Tensor& input : {shared, at::empty({size * count}, type)})
              for (const bool in_place : {false, true}) expect_squares(*backend, input, count, in_place);
          }
      });
    }
}

TEST(Squares, OfAGroupOrNothingIsBegun) {
  for (const int size : {1, 2, 3, 4, 5, 8})
    run_ranks(size, [&](World& world) {
      const auto begin = [&](std::int64_t numel, at::ScalarType type, std::shared_ptr<double> squares) {
        const at::Tensor input = at::full({numel}, world.rank + 1, type);
        const std::int64_t own = split_rows(numel, size)[static_cast<std::size_t>(world.rank)];
        return reduce_scatter_with_squares(world.group, at::empty({own}, type), input, squares);
      };
      const auto before = world.group.traffic().bytes();
      EXPECT_FALSE(begin(6 * size, at::kLong, std::make_shared<double>()));
      EXPECT_FALSE(begin(6 * size + 1, at::kFloat, std::make_shared<double>()));
      EXPECT_EQ(world.group.traffic().bytes(), before);
      const auto squares = std::make_shared<double>();
      auto pending = begin(6 * size, at::kFloat, squares);
      ASSERT_EQ(pending.has_value(), size > 1);
      if (!pending) return;
      pending->wait();
      const double sum = size * (size + 1) / 2;
      EXPECT_EQ(*squares, 6 * sum * sum);
    });
}

// A reduction whose caller has gone (after an error, say) still writes the number, which must exist.
TEST(Squares, LastAsLongAsTheReduction) {
  std::barrier<> begun(2);
  run_ranks(2, [&](World& world) {
    std::weak_ptr<double> left;
    const auto begin = [&] {
      auto squares = std::make_shared<double>();
      left = squares;
      return reduce_scatter_with_squares(world.group, at::empty({4}), at::ones({8}), squares);
    };
    if (world.rank == 0) {
      begin();
      EXPECT_FALSE(left.expired());
      begun.arrive_and_wait();
    } else {
      begun.arrive_and_wait();
      begin()->wait();
    }
    world.group.barrier();
  });
}

}  // namespace
}  // namespace isograd
