// The seams as linear maps of what all ranks have: each backward is held to the derivative of one process's
// loss, which every rank seeds with 1.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error_testing.hpp"
#include "isograd/tensor_parallel.hpp"
#include "isograd/world.hpp"

namespace isograd {
namespace {

using error_testing::error_of;
using ::testing::AllOf;
using ::testing::HasSubstr;

at::Tensor numbers(at::IntArrayRef shape, double seed) {
  return (at::arange(c10::multiply_integers(shape), at::kDouble) * 0.7 + seed).sin().view(shape).clone();
}

Group along_tp(World& world) { return Mesh(world, Grid({{"tp", world.size}})).along({"tp"}); }

Group::Rows uneven(std::int64_t rows, int ranks) {  // the second rank has none where there are three
  Group::Rows each = split_rows(rows, ranks);
  if (ranks >= 3) each[0] += std::exchange(each[1], 0);
  return each;
}

at::Tensor rows_of(const at::Tensor& whole, const Group::Rows& rows, int rank) {
  std::int64_t begin = 0;
  for (int r = 0; r < rank; ++r) begin += rows[static_cast<std::size_t>(r)];
  return whole.narrow(0, begin, rows[static_cast<std::size_t>(rank)]);
}

void expect_near(const at::Tensor& found, const at::Tensor& wanted, const std::string& what) {
  ASSERT_TRUE(found.defined()) << what;
  ASSERT_EQ(found.sizes(), wanted.sizes()) << what;
  if (wanted.numel() == 0) return;
  EXPECT_LT((found - wanted).abs().max().item<double>(), 1e-13) << what;
}

constexpr std::int64_t kTokens = 7, kIn = 4, kInner = 10;

// y = tanh(x up) down, the inner features assigned to ranks, between whole tokens or cut ones; the loss is
// Σ weight · tanh(y). Before the products a norm's weight works on the tokens of the seam.
struct Whole {
  at::Tensor x = numbers({kTokens, kIn}, 1).requires_grad_(), norm = numbers({kIn}, 2).requires_grad_(),
             up = numbers({kIn, kInner}, 3).requires_grad_(),
             down = numbers({kInner, kIn}, 4).requires_grad_(), weight = numbers({kTokens, kIn}, 5), loss;
  Whole() {
    const at::Tensor y = at::tanh(at::mm(x * norm, up)).mm(down);
    loss = (weight * at::tanh(y)).sum();
    loss.backward();
  }
};

class Seams : public ::testing::TestWithParam<std::tuple<int, bool, bool>> {};
INSTANTIATE_TEST_SUITE_P(RanksCutUneven, Seams,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4, 5, 8), ::testing::Bool(),
                                            ::testing::Bool()));

TEST_P(Seams, GiveTheGradientOfOneProcess) {
  const auto [ranks, cut_by_tokens, is_uneven] = GetParam();
  const Whole whole;
  run_ranks(ranks, [&](World& world) {
    check_tp_regions(true);
    Group tp = along_tp(world);
    const int rank = world.rank, count = world.size;
    const Group::Rows tokens = is_uneven ? uneven(kTokens, count) : Group::Rows{},
                      assignment = is_uneven ? tokens : split_rows(kTokens, count),
                      inner = is_uneven ? uneven(kInner, count) : split_rows(kInner, count);
    const auto leaf = [](const at::Tensor& of) { return of.detach().clone().requires_grad_(); };
    const at::Tensor x = leaf(whole.x), norm = leaf(whole.norm),
                     up = leaf(rows_of(whole.up.t(), inner, rank).t()),
                     down = leaf(rows_of(whole.down, inner, rank));
    at::Tensor y;
    if (cut_by_tokens) {
      const at::Tensor in = gather_from_sequence(tp, split_tokens(tp, x, tokens) * norm, tokens);
      y = gather_tokens(tp, reduce_scatter_to_sequence(tp, at::tanh(in.mm(up)).mm(down), tokens), tokens);
    } else {
      y = reduce_from_tp(tp, at::tanh(copy_to_tp(tp, x * norm).mm(up)).mm(down));
    }
    const at::Tensor loss = (whole.weight * at::tanh(y)).sum();
    expect_near(loss.detach(), whole.loss.detach(), "loss");
    loss.backward();
    expect_near(x.grad(), whole.x.grad(), "x");
    expect_near(up.grad(), rows_of(whole.up.grad().t(), inner, rank).t(), "up");
    expect_near(down.grad(), rows_of(whole.down.grad(), inner, rank), "down");
    at::Tensor of_norm = norm.grad().clone();
    if (cut_by_tokens) {  // each rank's tokens alone: a part, which the placement has summed
      if (count > 1 && assignment[0] < kTokens) {
        EXPECT_GT((of_norm - whole.norm.grad()).abs().max().item<double>(), 1e-3);
      }
      tp.all_reduce(of_norm);
    }
    expect_near(of_norm, whole.norm.grad(), "norm");
    check_tp_regions(false);
  });
}

// A bare sum in place of a seam: what the pairs are there for.
TEST(SeamsPlanted, LeavingOutASeamIsSeen) {
  const Whole whole;
  run_ranks(2, [&](World& world) {
    Group tp = along_tp(world);
    const Group::Rows inner = split_rows(kInner, 2);
    const at::Tensor x = whole.x.detach().clone().requires_grad_();
    const auto y = [&](const at::Tensor& in) {
      return reduce_from_tp(
          tp, at::tanh((in * whole.norm.detach()).mm(rows_of(whole.up.detach().t(), inner, world.rank).t()))
                  .mm(rows_of(whole.down.detach(), inner, world.rank)));
    };
    (whole.weight * at::tanh(y(x))).sum().backward();  // without copy_to_tp(): this rank's part alone
    EXPECT_GT((x.grad() - whole.x.grad()).abs().max().item<double>(), 1e-3);
    x.mutable_grad().reset();
    (whole.weight * at::tanh(y(copy_to_tp(tp, x)))).sum().backward();
    expect_near(x.grad(), whole.x.grad(), "with it");
  });
}

TEST(SeamsChecked, NameWhatIsNotTheSameAndWhatIsNoPart) {
  check_tp_regions(true);
  run_ranks(3, [](World& world) {
    Group tp = along_tp(world);
    const at::Tensor same = numbers({6, 2}, 1), own = numbers({6, 2}, world.rank);
    const auto said = [](const std::function<void()>& call) { return error_of<PeerError>(call); };
    EXPECT_THAT(said([&] { copy_to_tp(tp, own); }),
                AllOf(HasSubstr("copy_to_tp()"), HasSubstr("of rank 1"), HasSubstr("differs from rank 0's")));
    EXPECT_THAT(said([&] { split_tokens(tp, own); }), HasSubstr("split_tokens()"));
    EXPECT_THAT(said([&] { reduce_from_tp(tp, same); }),
                AllOf(HasSubstr("reduce_from_tp()"), HasSubstr("all 3 ranks")));
    EXPECT_THAT(said([&] { reduce_scatter_to_sequence(tp, same); }),
                HasSubstr("reduce_scatter_to_sequence()"));
    const at::Tensor part = own.clone().requires_grad_();
    EXPECT_THAT(said([&] { (reduce_from_tp(tp, part) * own).sum().backward(); }),
                HasSubstr("the gradient of the output of rank 1"));
    EXPECT_EQ(said([&] {
                copy_to_tp(tp, same), reduce_from_tp(tp, own), reduce_from_tp(tp, at::zeros({2, 2}));
              }),
              "no error");
  });
  check_tp_regions(false);
}

TEST(SeamsRefused, RowsThatDoNotAddUp) {
  run_ranks(2, [](World& world) {
    Group tp = along_tp(world);
    EXPECT_THAT(error_of([&] {
                  split_tokens(tp, numbers({6, 2}, 1), {3, 2});
                }),
                AllOf(HasSubstr("add up to 5"), HasSubstr("6 together")));
    EXPECT_THAT(error_of([&] {
                  reduce_scatter_to_sequence(tp, numbers({6, 2}, 1), {6});
                }),
                HasSubstr("1 numbers"));
  });
}

}  // namespace
}  // namespace isograd
