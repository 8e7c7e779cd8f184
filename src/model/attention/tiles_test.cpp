#include "model/attention/tiles.hpp"
#include "model/attention/kernel.hpp"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <map>
#include <random>

#include "model/attention/attention.hpp"

namespace isograd {
namespace {

std::int64_t num_scores(const std::vector<Tile>& tiles) {
  std::int64_t scores = 0;
  for (const Tile& tile : tiles)
    scores +=
        tile.count * (tile.causal ? tile.q_length * (tile.q_length + 1) / 2 : tile.q_length * tile.k_length);
  return scores;
}

// Which score each tile covers, as (query row, key row); every one must be covered once.
std::map<std::pair<std::int64_t, std::int64_t>, int> covered(const std::vector<Tile>& tiles) {
  std::map<std::pair<std::int64_t, std::int64_t>, int> times;
  for (const Tile& tile : tiles)
    for (std::int64_t n = 0; n < tile.count; ++n)
      for (std::int64_t i = 0; i < tile.q_length; ++i)
        for (std::int64_t j = 0; j < (tile.causal ? i + 1 : tile.k_length); ++j)
          ++times[{tile.q_row + n * tile.q_length + i, tile.k_row + n * tile.k_length + j}];
  return times;
}

std::vector<Span> spans_from(const std::vector<std::array<std::int64_t, 3>>& parts) {
  std::vector<Span> spans;
  std::int64_t row = 0;
  for (const auto& [document, position, length] : parts) {
    spans.push_back({document, position, length, row});
    row += length;
  }
  return spans;
}

TEST(Tiles, CoverWhatMayBeSeenOnce) {
  EXPECT_TRUE(rc::check("any spans, equal, disjoint or overlapping", [] {
    const auto draw = [] {
      std::vector<std::array<std::int64_t, 3>> parts;
      for (int i = *rc::gen::inRange(0, 6); i > 0; --i)
        parts.push_back({*rc::gen::inRange(0, 3), *rc::gen::inRange(0, 9), *rc::gen::inRange(0, 7)});
      return spans_from(parts);
    };
    const auto queries = draw(), keys = draw();
    for (const bool causal : {true, false}) {
      const auto tiles = tiles_between(queries, keys, causal);
      const auto times = covered(tiles);
      std::int64_t wanted = 0;
      for (const Span& q : queries)
        for (const Span& k : keys) {
          bool any = false;
          for (std::int64_t i = 0; i < q.length; ++i)
            for (std::int64_t j = 0; j < k.length; ++j) {
              const bool seen = q.document == k.document && (!causal || q.position + i >= k.position + j);
              const auto found = times.find({q.row + i, k.row + j});
              RC_ASSERT((found == times.end() ? 0 : found->second) == (seen ? 1 : 0));
              wanted += seen;
              any |= seen;
            }
          RC_ASSERT(sees_any({q}, k, causal) == any);
        }
      RC_ASSERT(num_scores(tiles) == wanted);
    }
  }));
}

TEST(Tiles, EqualNeighboursAreOneTile) {
  const auto packs = spans_from({{0, 0, 4}, {1, 0, 4}, {2, 0, 4}, {3, 0, 5}});
  EXPECT_EQ(tiles_between(packs, packs, true),
            (std::vector<Tile>{{0, 4, 0, 4, true, 3}, {12, 5, 12, 5, true, 1}}));
}

struct TiledProblem {
  at::Tensor q, k, v, gradient;
  std::vector<std::int64_t> cu_seqlens;
};

TiledProblem make_problem(std::int64_t heads, std::int64_t key_heads, at::ScalarType type,
                          std::uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  TiledProblem problem;
  problem.cu_seqlens = {0, 3, 3, 40, 41, 80, 84, 88};
  const auto draw = [&](std::int64_t n) {
    return at::randn({88, n, 16}, generator, at::TensorOptions().dtype(at::kDouble)).to(type);
  };
  problem.q = draw(heads), problem.k = draw(key_heads), problem.v = draw(key_heads),
  problem.gradient = draw(heads);
  return problem;
}

// out, dq, dk, dv of the whole by its naive twin and autograd.
std::vector<at::Tensor> whole(const TiledProblem& problem, bool causal) {
  std::vector<at::Tensor> leaves;
  for (const auto& x : {problem.q, problem.k, problem.v})
    leaves.push_back(x.detach().clone().requires_grad_());
  const at::Tensor out =
      naive_variable_length_attention(leaves[0], leaves[1], leaves[2], problem.cu_seqlens, causal);
  std::vector<at::Tensor> results{out.detach()};
  for (auto& gradient : torch::autograd::grad({out}, leaves, {problem.gradient})) results.push_back(gradient);
  return results;
}

// The same in blocks: tokens are assigned to `parts` holders by random cuts, and each holder's queries meet
// each holder's keys, in any order.
template <typename Attend, typename Backward>
std::vector<at::Tensor> in_parts(const TiledProblem& problem, bool causal, int parts, Attend&& attend_tile,
                                 Backward&& backward_tile) {
  std::mt19937 random(static_cast<unsigned>(parts));
  struct Holder {
    std::vector<Span> spans;
    at::Tensor rows;  // in the whole
    Attended attended;
    Qkv gradients;
  };
  std::vector<Holder> holders(static_cast<std::size_t>(parts));
  std::vector<std::vector<std::int64_t>> rows(holders.size());
  for (std::size_t d = 0; d + 1 < problem.cu_seqlens.size(); ++d) {
    const std::int64_t length = problem.cu_seqlens[d + 1] - problem.cu_seqlens[d];
    for (std::int64_t begin = 0; begin < length;) {
      const std::int64_t n = std::min<std::int64_t>(length - begin, 1 + random() % 9);
      const std::size_t to = random() % holders.size();
      holders[to].spans.push_back(
          {static_cast<std::int64_t>(d), begin, n, static_cast<std::int64_t>(rows[to].size())});
      for (std::int64_t i = 0; i < n; ++i) rows[to].push_back(problem.cu_seqlens[d] + begin + i);
      begin += n;
    }
  }
  const auto part = [](const at::Tensor& x, const Holder& holder) { return x.index_select(0, holder.rows); };
  std::vector<at::Tensor> results;
  for (const at::Tensor& x : {problem.q, problem.q, problem.k, problem.v})
    results.push_back(at::zeros(x.sizes(), x.options().dtype(accumulating_type(x.scalar_type()))));
  for (std::size_t i = 0; i < holders.size(); ++i) {
    Holder& holder = holders[i];
    holder.rows = at::tensor(rows[i], at::kLong);
    holder.attended = Attended::nothing(part(problem.q, holder));
    const auto zeros = [&](const at::Tensor& x) {
      return at::zeros(part(x, holder).sizes(), results[0].options());
    };
    holder.gradients = {zeros(problem.q), zeros(problem.k), zeros(problem.v)};
  }
  for (Holder& mine : holders) {
    for (const Holder& other : holders)
      for (const Tile& tile : tiles_between(mine.spans, other.spans, causal))
        attend_tile(Qkv{part(problem.q, mine), part(problem.k, other), part(problem.v, other)}, tile,
                    mine.attended);
    results[0].index_copy_(0, mine.rows, mine.attended.out);
  }
  for (Holder& mine : holders)
    for (Holder& other : holders) {
      const AttendedGradient attended{mine.attended.out.to(problem.q.scalar_type()), mine.attended.log_sums,
                                      part(problem.gradient, mine)};
      Qkv gradients{mine.gradients.q, other.gradients.k, other.gradients.v};
      for (const Tile& tile : tiles_between(mine.spans, other.spans, causal))
        backward_tile(Qkv{part(problem.q, mine), part(problem.k, other), part(problem.v, other)}, attended,
                      tile, gradients);
    }
  for (const Holder& mine : holders) {
    results[1].index_copy_(0, mine.rows, mine.gradients.q);
    results[2].index_copy_(0, mine.rows, mine.gradients.k);
    results[3].index_copy_(0, mine.rows, mine.gradients.v);
  }
  return results;
}

double relative_distance(const at::Tensor& a, const at::Tensor& b) {
  return ((a.to(at::kDouble) - b.to(at::kDouble)).norm() / b.to(at::kDouble).norm()).item<double>();
}

// Sums of up to 39 products of unit-sized numbers, as in attention_test; bf16 rounds each part once more.
TEST(Tiles, PartsMergedAreTheWhole) {
  struct Type {
    at::ScalarType type;
    double tolerance;
  };
  for (const auto& [type, tolerance] :
       {Type{at::kDouble, 1e-13}, Type{at::kFloat, 1e-5}, Type{at::kBFloat16, 0.03}})
    for (const auto& [heads, key_heads] : {std::pair{2, 2}, {4, 2}, {3, 1}})
      for (const bool causal : {true, false}) {
        const auto problem = make_problem(heads, key_heads, type, 1);
        const auto wanted = whole(problem, causal);
        for (const int parts : {1, 2, 5})
          for (const bool by_products : {false, true}) {
            const auto results =
                by_products ? in_parts(problem, causal, parts, products::attend, products::attend_backward)
                            : in_parts(problem, causal, parts, attend, attend_backward);
            for (std::size_t i = 0; i < wanted.size(); ++i)
              EXPECT_LT(relative_distance(results[i], wanted[i]), tolerance)
                  << c10::toString(type) << " heads " << heads << "/" << key_heads << " causal " << causal
                  << " parts " << parts << " by products " << by_products << " result " << i;
          }
      }
}

// The log-sums must be the merged ones: a block's own give it all the weight.
TEST(Tiles, OwnLogSumsInBackwardAreSeen) {
  const auto problem = make_problem(2, 2, at::kDouble, 2);
  const auto wrong = [](const Qkv& of, const AttendedGradient& attended, const Tile& tile,
                        const Qkv& gradients) {
    Attended own = Attended::nothing(of.q);
    attend(of, tile, own);
    attend_backward(of, {attended.out, own.log_sums, attended.gradient}, tile, gradients);
  };
  const auto wanted = whole(problem, true), results = in_parts(problem, true, 3, attend, wrong);
  EXPECT_LT(relative_distance(results[0], wanted[0]), 1e-13);
  for (std::size_t i = 1; i < wanted.size(); ++i) EXPECT_GT(relative_distance(results[i], wanted[i]), 0.01);
}

// More queries than one product takes.
TEST(Tiles, LongOnes) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
  const auto draw = [&](std::int64_t n) { return at::randn({600, n, 8}, generator, at::kDouble); };
  const at::Tensor q = draw(4), k = draw(2), v = draw(2), gradient = draw(4);
  for (const bool causal : {true, false}) {
    const auto run = [&](auto&& forward, auto&& backward) {
      const Tile tile{0, 600, 0, 600, causal, 1};
      Attended attended = Attended::nothing(q);
      forward(Qkv{q, k, v}, tile, attended);
      Qkv gradients{at::zeros_like(q), at::zeros_like(k), at::zeros_like(v)};
      backward(Qkv{q, k, v}, AttendedGradient{attended.out, attended.log_sums, gradient}, tile, gradients);
      return std::vector{attended.out, gradients.q, gradients.k, gradients.v};
    };
    const auto ours = run(attend, attend_backward), twin = run(products::attend, products::attend_backward);
    for (std::size_t i = 0; i < ours.size(); ++i) EXPECT_LT(relative_distance(ours[i], twin[i]), 1e-13);
  }
}

}  // namespace
}  // namespace isograd
