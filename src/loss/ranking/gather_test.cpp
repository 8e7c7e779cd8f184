// The three gathers: values, and what sums and averages of parameter gradients each is exact under.
#include "isograd/ranking.hpp"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <numeric>

#include "base/error_testing.hpp"
#include "isograd/error.hpp"
#include "isograd/world.hpp"

namespace isograd {
namespace {

using ::testing::HasSubstr;

Group::Rows rows_of(int ranks) {
  const Group::Rows all = {5, 3, 0, 6, 1, 0, 4, 2};
  return {all.begin(), all.begin() + ranks};
}

at::Tensor features(int rank, std::int64_t rows) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(rank + 1));
  return at::randn({rows, 3}, generator, at::TensorOptions(at::kDouble));
}

at::Tensor weight() { return at::tensor({0.3, -1.1, 0.7}, at::kDouble).unsqueeze(1).requires_grad_(true); }

// Does not decompose over rows.
at::Tensor global_loss(const at::Tensor& scores) {
  return at::logsumexp(scores.flatten(), 0) * scores.square().sum();
}

class GatherAt : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, GatherAt, ::testing::Values(1, 2, 3, 4, 5, 8));

TEST_P(GatherAt, IsExactUnderTheReductionThatItsTableSays) {
  const int ranks = GetParam();
  const Group::Rows rows = rows_of(ranks);
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < ranks; ++rank)
    parts.push_back(features(rank, rows[static_cast<std::size_t>(rank)]));
  const at::Tensor whole = at::cat(parts), one = weight();
  const at::Tensor loss = global_loss(whole.matmul(one));
  const at::Tensor wanted = torch::autograd::grad({loss}, {one})[0];
  run_ranks(ranks, [&](World& world) {
    const auto mine = static_cast<std::size_t>(world.rank);
    const auto summed = [&](const auto& gather, bool share) {
      const at::Tensor own = weight();
      const at::Tensor all = gather(world.group, parts[mine].matmul(own));
      at::Tensor value = global_loss(all);
      EXPECT_NEAR(value.item<double>(), loss.item<double>(), 1e-12 * std::abs(loss.item<double>()));
      if (share) value = value * ((world.rank + 1.0) * 2 / (ranks * (ranks + 1.0)));  // L_r, Σ L_r = L
      if (!value.requires_grad()) return at::zeros_like(own);
      at::Tensor gradient = torch::autograd::grad({value}, {own})[0].clone();
      world.group.all_reduce(gradient);
      return gradient;
    };
    const auto off = [&](const at::Tensor& found, double factor) {
      return (found - factor * wanted).norm().item<double>() / wanted.norm().item<double>();
    };
    for (const bool given : {false, true}) {
      const Group::Rows told = given ? rows : Group::Rows{};
      const auto with_grad = [&](Group group, const at::Tensor& t) {
        return all_gather_with_grad(group, t, told);
      };
      const auto sum_grad = [&](Group group, const at::Tensor& t) {
        return all_gather_sum_grad(group, t, told);
      };
      const auto no_grad = [&](Group group, const at::Tensor& t) {
        return all_gather_no_grad(group, t, told);
      };
      const Traffic before = world.group.traffic();
      EXPECT_LT(off(summed(with_grad, false), 1), 1e-12);
      Traffic after = world.group.traffic();
      if (ranks > 1) {
        const auto was = before.operations.find("all_gather");
        EXPECT_EQ(
            after.operations["all_gather"].calls - (was == before.operations.end() ? 0 : was->second.calls),
            given ? 1 : 2);
      }
      EXPECT_LT(off(summed(sum_grad, false), ranks), 1e-12);
      EXPECT_LT(off(summed(sum_grad, true), 1), 1e-12);
      EXPECT_EQ(summed(no_grad, false).norm().item<double>(), 0);
      // Planted fault: shares with the local slice have a wrong direction.
      if (ranks > 2) {
        EXPECT_GT(off(summed(with_grad, true), 1), 1e-3);
      }
    }
  });
}

TEST(Gather, OnOneRankIsTheTensorItself) {
  const at::Tensor x = at::randn({3, 2}).requires_grad_(true);
  EXPECT_TRUE(all_gather_with_grad(Group::solo(), x).is_same(x));
  EXPECT_TRUE(all_gather_sum_grad(Group::solo(), x).is_same(x));
  EXPECT_FALSE(all_gather_no_grad(Group::solo(), x).requires_grad());
}

TEST(Gather, TakesIntegersAndTensorsThatAreNotContiguous) {
  run_ranks(3, [](World& world) {
    const at::Tensor x = (at::arange(12).view({3, 4}) + 100 * world.rank).t();
    const at::Tensor all = all_gather_with_grad(world.group, x);
    EXPECT_EQ(all.sizes(), at::IntArrayRef({12, 3}));
    EXPECT_TRUE(all.narrow(0, 4, 4).equal((at::arange(12).view({3, 4}) + 100).t()));
    EXPECT_EQ(all_gather_no_grad(world.group, at::zeros({0, 2})).sizes(), at::IntArrayRef({0, 2}));
  });
}

TEST(Gather, NamesRanksThatDoNotFitOnEveryRank) {
  using error_testing::error_of;
  run_ranks(3, [&](World& world) {
    const at::Tensor x = at::zeros({2, world.rank == 1 ? 4 : 3}, world.rank == 2 ? at::kHalf : at::kFloat);
    EXPECT_THAT(error_of([&] { all_gather_with_grad(world.group, x); }),
                HasSubstr("rank 1: [.., 4] of Float"));
    const at::Tensor scalar = world.rank == 1 ? at::zeros({}) : at::zeros({1});
    EXPECT_THAT(error_of([&] { all_gather_no_grad(world.group, scalar); }), HasSubstr("rank 1: no tensor"));
    EXPECT_THAT(error_of([&] {
                  all_gather_no_grad(world.group, at::zeros({2}), {1, 1, 1});
                }),
                HasSubstr("rows 1, 1, 1"));
  });
}

}  // namespace
}  // namespace isograd
