#include "model/attention/attention.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include "full_tests.hpp"
#include "isograd/error.hpp"
#include "kernels/matmul/product.hpp"
#include "model/attention/kernel.hpp"

namespace isograd {
namespace {

struct Problem {
  at::Tensor q, k, v, weight;  // the loss is Σ weight · output
};

Problem make_problem(std::int64_t tokens, std::int64_t heads, std::int64_t key_heads, std::int64_t dim,
                     at::ScalarType type, std::uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const auto draw = [&](std::int64_t n) {
    return at::randn({tokens, n, dim}, generator, at::TensorOptions().dtype(at::kDouble)).to(type);
  };
  return {draw(heads), draw(key_heads), draw(key_heads), draw(heads)};
}

using Attention = at::Tensor (*)(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                 const std::vector<std::int64_t>&, bool);

// Output and the gradients of q, k, v.
std::vector<at::Tensor> run(Attention attention, const Problem& problem,
                            const std::vector<std::int64_t>& cu_seqlens, bool causal = true) {
  std::vector<at::Tensor> leaves;
  for (const auto& x : {problem.q, problem.k, problem.v})
    leaves.push_back(x.detach().clone().requires_grad_());
  const at::Tensor out = attention(leaves[0], leaves[1], leaves[2], cu_seqlens, causal);
  std::vector<at::Tensor> result{out.detach()};
  for (auto& gradient : torch::autograd::grad({(out * problem.weight).sum()}, leaves))
    result.push_back(gradient);
  return result;
}

double relative(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0) return 0;
  return ((a.to(at::kDouble) - b.to(at::kDouble)).norm() / b.to(at::kDouble).norm().clamp_min(1e-300))
      .item<double>();
}

const std::vector<std::vector<std::int64_t>> kCuts = {
    {0, 37}, {0, 1, 37}, {0, 8, 16, 24, 37}, {0, 0, 5, 5, 36, 37}, {0, 10, 20, 21, 22, 30, 37}};

// Both are sums of up to 37 products of unit-sized numbers: a few hundred roundings at the very most.
TEST(Attention, AgreesWithItsNaiveTwin) {
  struct Type {
    at::ScalarType type;
    double tolerance;
  };
  for (const auto& [type, tolerance] :
       {Type{at::kDouble, 1e-13}, Type{at::kFloat, 1e-5}, Type{at::kBFloat16, 0.03}})
    for (const auto& [heads, key_heads] : {std::pair{4, 4}, {4, 2}, {6, 2}, {3, 1}})
      for (const auto& cut : kCuts)
        for (const bool causal : {true, false}) {
          const auto problem = make_problem(37, heads, key_heads, 16, type, 1);
          const auto ours = run(variable_length_attention, problem, cut, causal);
          const auto theirs = run(naive_variable_length_attention, problem, cut, causal);
          for (std::size_t i = 0; i < ours.size(); ++i)
            EXPECT_LT(relative(ours[i], theirs[i]), tolerance)
                << c10::toString(type) << " heads " << heads << "/" << key_heads << " fragments "
                << cut.size() - 1 << " causal " << causal << " result " << i;
        }
}

// Relative error of the norm in fp32, of outputs and gradients. A score of D products is off by at most
// (D + 1) u of the sum of their magnitudes, at most S here, and so its weight by (D + 1) u S and the
// exponential's 4 u; sums of at most n weights and products of D add n + D roundings. Twice, as backward has
// two such factors.
double bound(const Problem& p, std::int64_t longest) {
  const double u = std::ldexp(1.0, -24), dim = static_cast<double>(p.q.size(2));
  const double size = p.q.abs().max().item<double>() * p.k.abs().sum(2).max().item<double>() / std::sqrt(dim);
  return 2 * u * ((dim + 1) * size + 4 + static_cast<double>(longest) + dim);
}

class ByMultiplier : public ::testing::TestWithParam<Multiplier> {
 protected:
  void SetUp() override { multiplier() = GetParam(); }
  void TearDown() override { multiplier() = before_; }

 private:
  const Multiplier before_ = multiplier();
};
// LibTorch's kernel, and ours.
INSTANTIATE_TEST_SUITE_P(Attention, ByMultiplier, ::testing::Values(Multiplier::kBlas, Multiplier::kBrgemm));

// Lengths around the ends of blocks of queries (64), of keys (512) and of what blocks are filled up to (32).
// Half of the heads and masks by turns; ISOGRAD_FULL_TESTS=1: all.
TEST_P(ByMultiplier, AgreesWithItsNaiveTwinOverBlocks) {
  std::size_t turn = 0;
  static std::map<std::size_t, std::vector<at::Tensor>> twins;  // the same of every multiplier
  for (const std::vector<std::int64_t>& cut : {std::vector<std::int64_t>{0, 31, 63, 127, 192, 257},
                                               {0, 64, 128, 192, 225},
                                               {0, 511, 640},
                                               {0, 512},
                                               {0, 513, 1030},
                                               {0, 1153}})
    for (const auto& [heads, key_heads, dim] : {std::tuple{2, 2, 16}, {6, 2, 20}, {3, 1, 65}})
      for (const bool causal : {true, false}) {
        if ((turn++ + cut.size()) % 2 != 0 && !full_tests()) continue;
        const auto problem = make_problem(cut.back(), heads, key_heads, dim, at::kFloat, 7);
        auto wide = problem;
        for (auto* x : {&wide.q, &wide.k, &wide.v, &wide.weight}) *x = x->to(at::kDouble);
        const auto ours = run(variable_length_attention, problem, cut, causal);
        auto& wanted = twins[turn];
        if (wanted.empty()) wanted = run(naive_variable_length_attention, wide, cut, causal);
        for (std::size_t i = 0; i < ours.size(); ++i)
          EXPECT_LT(relative(ours[i], wanted[i]), bound(problem, cut.back()))
              << "heads " << heads << "/" << key_heads << " of " << dim << ", " << cut.back() << " tokens in "
              << cut.size() - 1 << ", causal " << causal << ", result " << i << ", seed 7";
      }
}

// Longer than what is gathered at once (8,192), against LibTorch's kernel in fp64, which the tests above hold
// to the twin. ISOGRAD_FULL_TESTS=1: without a mask too, which the shorter ones above have.
TEST(AttentionByBlocks, AgreesOverLongFragments) {
  const Multiplier before = std::exchange(multiplier(), Multiplier::kBrgemm);
  const auto problem = make_problem(8300, 2, 1, 16, at::kFloat, 10);
  auto wide = problem;
  for (auto* x : {&wide.q, &wide.k, &wide.v, &wide.weight}) *x = x->to(at::kDouble);
  for (const bool causal : {true, false}) {
    if (!causal && !full_tests()) continue;
    const auto ours = run(variable_length_attention, problem, {0, 8300}, causal);
    const auto wanted = run(variable_length_attention, wide, {0, 8300}, causal);
    for (std::size_t i = 0; i < ours.size(); ++i)
      EXPECT_LT(relative(ours[i], wanted[i]), bound(problem, 8300))
          << "causal " << causal << ", result " << i << ", seed 10";
  }
  multiplier() = before;
}

// The computation on a device without a kernel for the type, here on the CPU; with one score
// allowed, slices end after 256 queries.
std::vector<at::Tensor> by_products(const Problem& p, const std::vector<std::int64_t>& cut, bool causal,
                                    std::int64_t scores) {
  std::vector<Tile> tiles;
  for (std::size_t f = 0; f + 1 < cut.size(); ++f)
    tiles.push_back({.q_row = cut[f],
                     .q_length = cut[f + 1] - cut[f],
                     .k_row = cut[f],
                     .k_length = cut[f + 1] - cut[f],
                     .causal = causal});
  at::Tensor out = at::full_like(p.q, NAN);
  products::attend_fragments({p.q, p.k, p.v}, tiles, out, scores);
  const Qkv of{at::full_like(p.q, NAN), at::full_like(p.k, NAN), at::full_like(p.v, NAN)};
  products::attend_fragments_backward({p.q, p.k, p.v}, p.weight, tiles, of, scores);
  return {out, of.q, of.k, of.v};
}

TEST(Attention, ProductsOfWholeFragmentsAgreeWithTheNaiveTwin) {
  for (const auto& [heads, key_heads, dim] : {std::tuple{2, 2, 16}, {6, 2, 20}, {3, 1, 65}})
    for (const std::vector<std::int64_t>& cut :
         {std::vector<std::int64_t>{0, 1, 37}, {0, 255, 511, 768}, {0, 257, 600}, {0, 513}})
      for (const bool causal : {true, false}) {
        const auto problem = make_problem(cut.back(), heads, key_heads, dim, at::kFloat, 11);
        auto wide = problem;
        for (auto* x : {&wide.q, &wide.k, &wide.v, &wide.weight}) *x = x->to(at::kDouble);
        const auto wanted = run(naive_variable_length_attention, wide, cut, causal);
        auto lacking = wide;
        lacking.k = wide.k.clone(), lacking.k[cut.back() / 2].fill_(-1e4);
        EXPECT_GT(relative(by_products(lacking, cut, causal, 1)[0], wanted[0]), 1e-6) << "a key left out";
        for (const std::int64_t scores : {std::int64_t{1}, products::kScores}) {
          const auto narrow = by_products(problem, cut, causal, scores),
                     exact = by_products(wide, cut, causal, scores);
          for (std::size_t i = 0; i < wanted.size(); ++i) {
            EXPECT_LT(relative(narrow[i], wanted[i]), bound(problem, cut.back()))
                << "result " << i << ", seed 11";
            EXPECT_LT(relative(exact[i], wanted[i]), std::ldexp(bound(problem, cut.back()), 24 - 53))
                << "result " << i << ", seed 11";
          }
        }
      }
}

// Without one key of 1,153, or with it alone: the comparison must see it.
TEST_P(ByMultiplier, TheComparisonSeesOneKeyLess) {
  const auto problem = make_problem(1153, 2, 2, 16, at::kFloat, 7);
  auto lacking = problem;
  lacking.k = problem.k.clone(), lacking.k[700].fill_(-1e4);  // its weights are 0 or all
  const auto whole = run(variable_length_attention, problem, {0, 1153}),
             less = run(variable_length_attention, lacking, {0, 1153});
  for (std::size_t i = 0; i < whole.size(); ++i)
    EXPECT_GT(relative(less[i], whole[i]), bound(problem, 1153)) << "result " << i;
}

// Several calls reuse one another's memory: with as many threads, and by our blocks with any number
// of them. The BLAS may cut its sums by threads.
TEST_P(ByMultiplier, SameBitsRunToRun) {
  const int before = at::get_num_threads();
  for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const auto problem = make_problem(700, 4, 2, 32, type, 8);
    std::vector<at::Tensor> first;
    for (const int threads : {1, 3}) {
      at::set_num_threads(threads);
      if (first.empty() || type != at::kFloat || GetParam() != Multiplier::kBrgemm)
        first = run(variable_length_attention, problem, {0, 100, 700});
      for (int call = 0; call < 2; ++call) {
        const at::Tensor elsewhere = at::empty({call * 1000 + 1});
        const auto again = run(variable_length_attention, problem, {0, 100, 700});
        for (std::size_t i = 0; i < first.size(); ++i)
          EXPECT_TRUE(again[i].equal(first[i]))
              << c10::toString(type) << ", " << threads << " threads, result " << i;
      }
    }
  }
  at::set_num_threads(before);
}

// A key that is no number reaches every query that sees it, and none of another fragment.
TEST_P(ByMultiplier, ANumberThatIsNoneIsNotSwallowed) {
  const auto problem = make_problem(700, 2, 1, 16, at::kFloat, 9);
  problem.k[650].fill_(NAN);
  const auto out = variable_length_attention(problem.q, problem.k, problem.v, {0, 600, 700});
  EXPECT_TRUE(out.narrow(0, 650, 50).isnan().all().item<bool>());
  EXPECT_FALSE(out.narrow(0, 0, 600).isnan().any().item<bool>());
}

TEST(Attention, TheTwinsDifferWhereTheyShould) {
  const auto problem = make_problem(37, 4, 2, 16, at::kDouble, 2);
  const auto whole = run(variable_length_attention, problem, {0, 37});
  const auto cut = run(variable_length_attention, problem, {0, 20, 37});
  const auto both_ways = run(variable_length_attention, problem, {0, 37}, false);
  for (std::size_t i = 0; i < whole.size(); ++i) {
    EXPECT_GT(relative(cut[i], whole[i]), 0.01);
    EXPECT_GT(relative(both_ways[i], whole[i]), 0.01);
  }
}

// A change in one fragment leaves the output and gradients of every other fragment as they were, bit for bit.
TEST(Attention, NothingLeaksBetweenFragments) {
  const std::vector<std::int64_t> cut = {0, 7, 14, 21, 50, 51, 64};
  for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16})
    for (std::size_t victim = 0; victim + 1 < cut.size(); ++victim) {
      const auto problem = make_problem(64, 4, 2, 32, type, 3);
      auto changed = problem;
      for (auto* x : {&changed.q, &changed.k, &changed.v, &changed.weight}) {
        *x = x->clone();
        x->narrow(0, cut[victim], cut[victim + 1] - cut[victim]).mul_(-3).add_(1);
      }
      const auto before = run(variable_length_attention, problem, cut);
      const auto after = run(variable_length_attention, changed, cut);
      for (std::size_t f = 0; f + 1 < cut.size(); ++f)
        for (std::size_t i = 0; i < before.size(); ++i) {
          const auto part = [&](const at::Tensor& x) { return x.narrow(0, cut[f], cut[f + 1] - cut[f]); };
          const bool same = part(before[i]).equal(part(after[i]));
          const auto place = [&] {
            return fmt::format("{} changed {} looked at {} result {}", c10::toString(type), victim, f, i);
          };
          EXPECT_TRUE(f == victim || same) << place();
          // At least the output and the gradient of v of the changed document differ.
          EXPECT_FALSE(f == victim && (i == 0 || i == 3) && same) << place();
        }
    }
}

TEST(Attention, StridedInputsAndFrozenOnes) {
  const std::int64_t tokens = 20, heads = 4, key_heads = 2, dim = 8;
  const at::Tensor all = at::arange(tokens * (heads + 2 * key_heads) * dim, at::kDouble)
                             .sin()
                             .view({tokens, heads + 2 * key_heads, dim});
  const auto q = all.narrow(1, 0, heads), k = all.narrow(1, heads, key_heads).clone().requires_grad_(),
             v = all.narrow(1, heads + key_heads, key_heads);
  const auto out = variable_length_attention(q, k, v, {0, 12, 20});
  EXPECT_LT(relative(out.detach(), naive_variable_length_attention(q, k, v, {0, 12, 20}).detach()), 1e-13);
  out.sum().backward();
  EXPECT_TRUE(k.grad().defined());
  const at::Tensor permuted = q.transpose(0, 1).contiguous().transpose(0, 1);
  EXPECT_TRUE(variable_length_attention(permuted, k, v, {0, 12, 20}).equal(out));
}

TEST(Attention, AnEmptyBatchGivesEmptyGradients) {
  const auto results = run(variable_length_attention, make_problem(0, 4, 2, 8, at::kFloat, 4), {0});
  for (const auto& result : results) EXPECT_EQ(result.size(0), 0);
}

TEST(Attention, CachedEqualsWhole) {
  const auto problem = make_problem(19, 6, 2, 16, at::kDouble, 5);
  const at::Tensor whole = naive_variable_length_attention(problem.q, problem.k, problem.v, {0, 19});
  for (const std::int64_t last : {1, 4, 19})
    EXPECT_LT(relative(cached_attention(problem.q.narrow(0, 19 - last, last), problem.k, problem.v),
                       whole.narrow(0, 19 - last, last)),
              1e-13);
}

TEST(Attention, WhatDoesNotFitIsRefused) {
  const auto p = make_problem(8, 4, 2, 8, at::kFloat, 6);
  EXPECT_THROW(variable_length_attention(p.q, p.k, p.v, {0, 7}), ConfigError);
  EXPECT_THROW(variable_length_attention(p.q, p.k, p.v, {0, 6, 4, 8}), ConfigError);
  EXPECT_THROW(variable_length_attention(p.q, p.k, p.v, std::vector<std::int64_t>{}), ConfigError);
  EXPECT_THROW(variable_length_attention(p.q, p.k, p.v.to(at::kDouble), {0, 8}), ConfigError);
  EXPECT_THROW(variable_length_attention(p.q.narrow(1, 0, 3), p.k, p.v, {0, 8}), ConfigError);
}

}  // namespace
}  // namespace isograd
