// Each differentiable collective against its adjoint: ⟨Ax, y⟩ = ⟨x, Aᵀy⟩ summed over the ranks, exactly.
#include "isograd/group.hpp"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>

#include "isograd/world.hpp"

namespace isograd {
namespace {

namespace d = differentiable;
using Map = std::function<at::Tensor(const at::Tensor&)>;

const std::vector<int> kGroupSizes = {1, 2, 3, 4, 5};

// Whole numbers that depend on rank, slot and index, so all products and sums are exact.
at::Tensor encode(int rank, int slot, at::IntArrayRef sizes) {
  std::int64_t numel = 1;
  for (auto length : sizes) numel *= length;
  return at::arange(numel, at::kDouble)
      .mul(37)
      .add(rank * 101 + slot * 13 + 5)
      .remainder(19)
      .sub(7)
      .view(sizes);
}

struct AdjointCase {
  std::string name;
  Map map;
  std::vector<std::int64_t> input;  // sizes on this rank
  int ranks = 1;                    // the least number of ranks
};

// The rows of rank r in operations with uneven rows.
Group::Rows uneven(int size) {
  Group::Rows rows;
  for (int r = 0; r < size; ++r) rows.push_back(r % 3 == 1 ? 0 : r + 1);
  return rows;
}

std::int64_t total(const Group::Rows& rows) {
  std::int64_t sum = 0;
  for (auto part : rows) sum += part;
  return sum;
}

std::vector<AdjointCase> cases(Group group) {
  const int size = group.size(), rank = group.rank(), root = size - 1;
  const Group::Rows rows = uneven(size);
  // Rank a has 1 + a + 2b rows for rank b.
  Group::Rows to, from;
  for (int r = 0; r < size; ++r) {
    to.push_back(1 + rank + 2 * r);
    from.push_back(1 + r + 2 * rank);
  }
  const auto own = rows[static_cast<std::size_t>(rank)];
  return {
      {"all_reduce", [=](const at::Tensor& x) { return d::all_reduce(group, x); }, {3, 4}},
      {"reduce", [=](const at::Tensor& x) { return d::reduce(group, x, root); }, {5}},
      {"broadcast", [=](const at::Tensor& x) { return d::broadcast(group, x, root); }, {2, 3}},
      {"all_gather", [=](const at::Tensor& x) { return d::all_gather(group, x); }, {2, 2}},
      {"all_gather of one number", [=](const at::Tensor& x) { return d::all_gather(group, x); }, {}},
      {"all_gather_rows", [=](const at::Tensor& x) { return d::all_gather_rows(group, x, rows); }, {own, 2}},
      {"all_gather_rows, asking", [=](const at::Tensor& x) { return d::all_gather_rows(group, x); }, {own}},
      {"reduce_scatter", [=](const at::Tensor& x) { return d::reduce_scatter(group, x); }, {7, 2}},
      {"reduce_scatter, rows",
       [=](const at::Tensor& x) { return d::reduce_scatter(group, x, rows); },
       {total(rows), 3}},
      {"gather", [=](const at::Tensor& x) { return d::gather(group, x, root); }, {2, 3}},
      {"scatter",
       [=](const at::Tensor& x) { return d::scatter(group, x, root); },
       {rank == root ? size : rank, 3, 2}},
      {"all_to_all", [=](const at::Tensor& x) { return d::all_to_all(group, x); }, {2 * size, 2}},
      {"all_to_all, rows",
       [=](const at::Tensor& x) { return d::all_to_all(group, x, from, to); },
       {total(to), 2}},
      // Every rank sends to the next and receives from the previous one.
      {"send and recv",
       [=](const at::Tensor& x) {
         const at::Tensor sent = d::send(group, x, (rank + 1) % size, 3);
         const at::Tensor got = d::recv(group, sent.sum().expand({4}), (rank + size - 1) % size, 3);
         return got + sent.sum();
       },
       {4},
       2},
  };
}

// Both sides of ⟨Ax, y⟩ = ⟨x, Aᵀy⟩ over all ranks.
std::pair<double, double> products(Group& group, const at::Tensor& x, const at::Tensor& ax,
                                   const at::Tensor& y, const at::Tensor& aty) {
  at::Tensor both = at::stack({(ax * y).sum(), (x * aty).sum()});
  group.all_reduce(both);
  return {both[0].item<double>(), both[1].item<double>()};
}

at::Tensor adjoint(const at::Tensor& ax, const at::Tensor& x, const at::Tensor& y) {
  return torch::autograd::grad({ax}, {x}, {y})[0];
}

TEST(Differentiable, BackwardIsTheAdjoint) {
  for (int size : kGroupSizes) {
    run_ranks(size, [](World& world) {
      for (const AdjointCase& each : cases(world.group)) {
        if (world.size < each.ranks) continue;  // a message needs two ranks
        const at::Tensor x = encode(world.rank, 1, each.input).requires_grad_();
        const at::Tensor ax = each.map(x);
        const at::Tensor y = encode(world.rank, 2, ax.sizes());
        const at::Tensor aty = adjoint(ax, x, y);
        const auto [left, right] = products(world.group, x.detach(), ax.detach(), y, aty);
        EXPECT_EQ(left, right) << each.name << " on " << world.size << " ranks";
        EXPECT_NE(left, 0) << each.name << ": nothing was compared";
        ASSERT_TRUE(at::equal(x.detach(), encode(world.rank, 1, each.input))) << "inputs are not changed";
      }
    });
  }
}

// The adjoint of the adjoint is the map itself; this is a second backward.
TEST(Differentiable, BackwardsCanBeDifferentiatedAgain) {
  for (int size : {1, 2, 3}) {
    run_ranks(size, [](World& world) {
      for (const AdjointCase& each : cases(world.group)) {
        if (world.size < each.ranks) continue;
        const at::Tensor x = encode(world.rank, 1, each.input).requires_grad_();
        const at::Tensor ax = each.map(x);
        const at::Tensor y = encode(world.rank, 2, ax.sizes()).requires_grad_();
        const at::Tensor aty = torch::autograd::grad({ax}, {x}, {y}, true, true)[0];
        const at::Tensor again = torch::autograd::grad({aty}, {y}, {x.detach()})[0];
        EXPECT_TRUE(at::equal(again, ax.detach())) << each.name << " on " << world.size << " ranks";
      }
    });
  }
}

// The comparison detects common mistakes in backwards.
TEST(Differentiable, WrongBackwardsAreNoticed) {
  run_ranks(3, [](World& world) {
    Group group = world.group;
    const int root = 2;
    const std::vector<std::pair<AdjointCase, Map>> wrong = {
        {{"all_reduce", [=](const at::Tensor& x) { return d::all_reduce(group, x); }, {4}},
         [](const at::Tensor& y) { return y; }},
        {{"a mean", [=](const at::Tensor& x) { return d::all_reduce(group, x); }, {4}},
         [=](const at::Tensor& y) { return d::all_reduce(group, y) * (1.0 / 3); }},
        {{"broadcast", [=](const at::Tensor& x) { return d::broadcast(group, x, root); }, {4}},
         [=](const at::Tensor& y) { return group.rank() == root ? y : at::zeros_like(y); }},
        {{"reduce", [=](const at::Tensor& x) { return d::reduce(group, x, root); }, {4}},
         [](const at::Tensor& y) { return y; }},
        {{"all_gather", [=](const at::Tensor& x) { return d::all_gather(group, x); }, {4}},
         [=](const at::Tensor& y) { return y[group.rank()]; }},
        {{"reduce_scatter", [=](const at::Tensor& x) { return d::reduce_scatter(group, x); }, {6}},
         [](const at::Tensor& y) { return y.repeat({3}); }},
        {{"all_to_all", [=](const at::Tensor& x) { return d::all_to_all(group, x); }, {6}},
         [](const at::Tensor& y) { return y; }},
    };
    for (const auto& [each, backward] : wrong) {
      const at::NoGradGuard no_graph;
      const at::Tensor x = encode(world.rank, 1, each.input), ax = each.map(x);
      const at::Tensor y = encode(world.rank, 2, ax.sizes());
      const auto [left, right] = products(group, x, ax, y, backward(y));
      EXPECT_NE(left, right) << each.name << ": the wrong backward passed";
    }
  });
}

// Rank 1 needs no gradient, but the others need it in the backward.
TEST(Differentiable, RanksThatNeedNoGradientTakePart) {
  run_ranks(3, [](World& world) {
    at::Tensor x = at::full({2}, world.rank + 1.0, at::kDouble);
    if (world.rank != 1) x.requires_grad_();
    const at::Tensor sum = d::all_reduce(world.group, x);
    ASSERT_TRUE(sum.requires_grad());
    (sum * (world.rank + 1)).sum().backward();
    if (world.rank != 1) {
      EXPECT_TRUE(x.grad().eq(1 + 2 + 3).all().item<bool>());
    }
    const at::NoGradGuard no_graph;
    EXPECT_FALSE(d::all_reduce(world.group, x).requires_grad());
  });
}

TEST(Differentiable, IntegersPassThrough) {
  run_ranks(2, [](World& world) {
    const at::Tensor all = d::all_gather(world.group, at::full({1}, world.rank, at::kLong));
    EXPECT_FALSE(all.requires_grad());
    EXPECT_EQ(all[1].item<int>(), 1);
  });
}

}  // namespace
}  // namespace isograd
