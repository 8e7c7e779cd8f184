// A layer of experts over ranks that have tokens of their own: outputs and gradients are those of one process
// that has all tokens and all experts.
#include "parallel/expert/dispatch.hpp"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <numeric>

#include "base/error_testing.hpp"
#include "isograd/world.hpp"
#include "model/experts.hpp"

namespace isograd {
namespace {

constexpr std::int64_t kHidden = 6, kInner = 5;

at::Tensor numbers(at::IntArrayRef shape, double seed) {
  return (at::arange(c10::multiply_integers(shape), at::kDouble) * 0.7 + seed).sin().view(shape).clone();
}

// How many tokens each rank has.
using Tokens = std::function<std::int64_t(int rank, int ranks)>;
const std::vector<std::pair<const char*, Tokens>> kTokens = {
    {"uneven", [](int rank, int) { return std::int64_t{3} + 4 * (rank % 3); }},
    {"none on some", [](int rank, int) { return rank % 2 == 0 ? std::int64_t{5} : std::int64_t{0}; }},
    {"all on the last",
     [](int rank, int ranks) { return rank + 1 == ranks ? std::int64_t{9} : std::int64_t{0}; }},
    {"none", [](int, int) { return std::int64_t{0}; }}};

struct Problem {
  std::int64_t experts = 5, each = 2;
  bool to_few = false;  // all tokens to the same two experts
  at::Tensor x, router, gate, up, down, to;

  Problem(std::int64_t experts_, std::int64_t tokens, bool to_few_)
      : experts(experts_), each(std::min<std::int64_t>(2, experts_)), to_few(to_few_) {
    x = numbers({tokens, kHidden}, 1), to = numbers({tokens, kHidden}, 7);
    if (to_few) x = x.abs();
    router = numbers({experts, kHidden}, 2);
    if (to_few) {
      router.zero_();
      router.select(0, experts - 1).fill_(2), router.select(0, 0).fill_(1);
    }
    gate = numbers({experts, kInner, kHidden}, 3), up = numbers({experts, kInner, kHidden}, 4);
    down = numbers({experts, kHidden, kInner}, 5);
    for (at::Tensor* leaf : {&x, &router, &gate, &up, &down}) leaf->requires_grad_();
  }
};

struct Gradients {
  at::Tensor x, router, gate, up, down;
};

Gradients one_process(const Problem& p) {
  const Routing routing = route(p.x.matmul(p.router.t()), {.per_token = p.each});
  const at::Tensor y = naive_twin::experts(p.x, routing, p.gate, p.up, p.down);
  const auto g = torch::autograd::grad({(y * p.to).sum()}, {p.x, p.router, p.gate, p.up, p.down});
  return {g[0], g[1], g[2], g[3], g[4]};
}

// The result of a rank with tokens [from, from + count) and experts of `dispatch`.
Gradients on_rank(const Problem& p, const ExpertDispatch& dispatch, std::int64_t from, std::int64_t count,
                  bool uses_loss) {
  const auto leaf = [](const at::Tensor& values) { return values.detach().clone().requires_grad_(); };
  const std::int64_t first = dispatch.first_expert(), own = dispatch.own_experts();
  const at::Tensor x = leaf(p.x.narrow(0, from, count)), router = leaf(p.router),
                   gate = leaf(p.gate.narrow(0, first, own)), up = leaf(p.up.narrow(0, first, own)),
                   down = leaf(p.down.narrow(0, first, own));
  const Routing routing = route(x.matmul(router.t()), {.per_token = p.each});
  const ByExpert order = sort_by_expert(routing.chosen, p.experts);
  const DispatchPlan plan = dispatch.plan({order.begin}).front();
  Exchange there = dispatch.start_dispatch(copy_to_experts(x, order), plan);
  const at::Tensor outputs =
      compute_experts(dispatch.finish_dispatch(there, plan), gate, up, down, plan.begin);
  const at::Tensor y = add_by_weight(dispatch.start_combine(outputs, plan).finish(), routing.weights, order);
  at::Tensor loss = (y * p.to.narrow(0, from, count)).sum();
  if (!uses_loss) loss = loss * 0;
  const auto g = torch::autograd::grad({loss}, {x, router, gate, up, down}, {}, std::nullopt, false, true);
  return {g[0], g[1], g[2], g[3], g[4]};
}

void expect_near(const at::Tensor& found, const at::Tensor& wanted, const std::string& what) {
  ASSERT_TRUE(found.defined()) << what;
  ASSERT_EQ(found.sizes(), wanted.sizes()) << what;
  if (wanted.numel() == 0) return;
  EXPECT_LT((found - wanted).abs().max().item<double>(), 1e-12) << what;
}

class Dispatch : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Dispatch, ::testing::Values(1, 2, 3, 4, 5, 8));

TEST_P(Dispatch, GradientsAreThoseOfOneProcess) {
  const int ranks = GetParam();
  for (const std::int64_t experts : {std::int64_t{4}, std::int64_t{5}, std::int64_t{8}, std::int64_t{60}})
    for (const auto& [name, tokens_of] : kTokens)
      for (const bool to_few : {false, true}) {
        if (experts < ranks) continue;
        std::vector<std::int64_t> begin{0};
        for (int rank = 0; rank < ranks; ++rank) begin.push_back(begin.back() + tokens_of(rank, ranks));
        const Problem problem(experts, begin.back(), to_few);
        const Gradients wanted = one_process(problem);
        run_ranks(ranks, [&](World& world) {
          ExpertDispatch dispatch(world.group, experts);
          const auto from = begin[static_cast<std::size_t>(world.rank)],
                     count = begin[static_cast<std::size_t>(world.rank) + 1] - from;
          const Gradients found = on_rank(problem, dispatch, from, count, true);
          const std::string where =
              fmt::format("{} ranks, {} experts, {} tokens, to few {}: ", ranks, experts, name, to_few);
          const std::int64_t first = dispatch.first_expert(), own = dispatch.own_experts();
          expect_near(found.x, wanted.x.narrow(0, from, count), where + "x");
          expect_near(found.gate, wanted.gate.narrow(0, first, own), where + "gate");
          expect_near(found.up, wanted.up.narrow(0, first, own), where + "up");
          expect_near(found.down, wanted.down.narrow(0, first, own), where + "down");
          at::Tensor router = found.router.clone();  // of this rank's tokens: summed, as by data ranks
          world.group.all_reduce(router);
          expect_near(router, wanted.router, where + "router");
        });
      }
}

// A rank whose loss is a constant has peers that wait for it in backward; and its experts have a gradient.
TEST(Dispatch, ARankWhoseLossIsConstantTakesPart) {
  const std::vector<std::int64_t> begin{0, 4, 9, 12};
  const Problem problem(5, 12, false);
  Problem without = problem;
  without.to = problem.to.clone();
  without.to.narrow(0, 4, 5).zero_();
  const Gradients wanted = one_process(without);
  run_ranks(3, [&](World& world) {
    ExpertDispatch dispatch(world.group, 5);
    const auto from = begin[static_cast<std::size_t>(world.rank)],
               count = begin[static_cast<std::size_t>(world.rank) + 1] - from;
    const Gradients found = on_rank(problem, dispatch, from, count, world.rank != 1);
    expect_near(found.gate, wanted.gate.narrow(0, dispatch.first_expert(), dispatch.own_experts()), "gate");
  });
}

// <A x, y> = <x, A^T y> over all ranks, in whole numbers, and the adjoint of the adjoint is the map itself.
// Two are on their way at once, and something is computed meanwhile.
TEST_P(Dispatch, ExchangesInHalvesHaveTheirAdjoint) {
  run_ranks(GetParam(), [](World& world) {
    const auto from = [&](int rank, int to) { return std::int64_t{(rank + 2 * to) % 4}; };  // rows, or none
    Group::Rows sent, received;
    for (int other = 0; other < world.size; ++other)
      sent.push_back(from(world.rank, other)), received.push_back(from(other, world.rank));
    const auto whole = [&](std::int64_t rows, double seed) {
      return numbers({rows, 3}, seed + world.rank).mul(50).round();
    };
    const std::int64_t rows = std::accumulate(sent.begin(), sent.end(), std::int64_t{0}),
                       there = std::accumulate(received.begin(), received.end(), std::int64_t{0});
    const at::Tensor a = whole(rows, 1).requires_grad_(), b = whole(rows, 2).requires_grad_();
    Exchange first = Exchange::start(world.group, a, received, sent);
    Exchange second = Exchange::start(world.group, b, received, sent);
    const at::Tensor meanwhile = a * 3;
    const at::Tensor ax = first.finish(), bx = second.finish();
    ASSERT_EQ(ax.sizes(), at::IntArrayRef({there, 3}));
    EXPECT_TRUE(ax.equal(world.group.all_to_all(a.detach(), received, sent)));
    EXPECT_TRUE(bx.equal(world.group.all_to_all(b.detach(), received, sent)));
    const at::Tensor y = whole(there, 3).requires_grad_(), z = whole(there, 4).requires_grad_();
    const auto back =
        torch::autograd::grad({ax, bx, meanwhile}, {a, b}, {y, z, at::ones_like(a)}, true, true);
    EXPECT_TRUE((back[0] - 3).equal(world.group.all_to_all(y.detach(), sent, received)));
    EXPECT_TRUE(back[1].equal(world.group.all_to_all(z.detach(), sent, received)));
    const auto again = torch::autograd::grad({back[0], back[1]}, {y, z}, {a.detach(), b.detach()});
    EXPECT_TRUE(again[0].equal(ax.detach()));
    EXPECT_TRUE(again[1].equal(bx.detach()));
    // The same graph backwards once more.
    EXPECT_TRUE(torch::autograd::grad({ax}, {a}, {y.detach()})[0].equal(back[0].detach() - 3));
    const at::NoGradGuard no_graph;
    EXPECT_FALSE(Exchange::start(world.group, a, received, sent).finish().requires_grad());
  });
}

// A factor that peers carry: each rank's experts see the tokens of all, and the loss is divided once.
TEST(Dispatch, AFactorOfTheRanksIsSeen) {
  const Problem problem(4, 8, false);
  const Gradients wanted = one_process(problem);
  run_ranks(2, [&](World& world) {
    ExpertDispatch dispatch(world.group, 4);
    const Gradients found = on_rank(problem, dispatch, 4 * world.rank, 4, true);
    const at::Tensor own = wanted.gate.narrow(0, dispatch.first_expert(), dispatch.own_experts());
    EXPECT_GT((found.gate / 2 - own).abs().max().item<double>(), 1e-3);
    // Gradients of a rank's own tokens alone, as without the exchange, are other ones too.
    Problem alone = problem;
    alone.to = problem.to.clone();
    alone.to.narrow(0, 4 - 4 * world.rank, 4).zero_();
    EXPECT_GT(
        (one_process(alone).gate.narrow(0, dispatch.first_expert(), 2) - own).abs().max().item<double>(),
        1e-3);
  });
}

TEST(Dispatch, MoreRanksThanExpertsAreRefused) {
  run_ranks(3, [](World& world) {
    EXPECT_THAT(error_testing::error_of([&] { ExpertDispatch(world.group, 2); }),
                ::testing::HasSubstr("3 ranks for 2 experts"));
  });
}

}  // namespace
}  // namespace isograd
