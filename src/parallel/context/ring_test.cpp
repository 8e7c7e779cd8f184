// Attention over context ranks against one process: fp64, independent code.
#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <mutex>
#include <tuple>

#include "isograd/world.hpp"
#include "model/attention/attention.hpp"
#include "parallel/context/context_testing.hpp"

namespace isograd {
namespace {

using namespace testing;
using ::testing::HasSubstr;

constexpr std::int64_t kHeads = 12, kHeadDim = 4;

struct Problem {
  at::Tensor q, k, v, weight;  // of the whole row; the loss is Σ weight · output
};

Problem make_problem(std::int64_t tokens, std::int64_t key_heads, at::ScalarType type,
                     std::uint64_t seed = 1) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const auto draw = [&](std::int64_t n) {
    return at::randn({tokens, n, kHeadDim}, generator, at::TensorOptions().dtype(at::kDouble)).to(type);
  };
  return {draw(kHeads), draw(key_heads), draw(key_heads), draw(kHeads)};
}

using Results = std::vector<at::Tensor>;  // output and the gradients of q, k, v

template <typename Attention>
Results run(Attention&& attention, const Problem& problem) {
  std::vector<at::Tensor> leaves;
  for (const auto& x : {problem.q, problem.k, problem.v})
    leaves.push_back(x.detach().clone().requires_grad_());
  const at::Tensor out = attention(leaves[0], leaves[1], leaves[2]);
  Results results{out.detach()};
  for (auto& gradient : torch::autograd::grad({(out * problem.weight).sum()}, leaves))
    results.push_back(gradient);
  return results;
}

Results one_process(const Problem& problem, const std::vector<std::int64_t>& cu_seqlens, bool causal) {
  return run(
      [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
        return naive_variable_length_attention(q, k, v, cu_seqlens, causal);
      },
      problem);
}

// The same on every rank: computed by one of them.
const Results& one_process(const ContextCase& one, bool causal, std::int64_t key_heads) {
  static std::mutex mutex;
  static std::map<std::tuple<std::string, bool, std::int64_t>, Results> known;
  const std::lock_guard lock(mutex);
  Results& results = known[{one.name, causal, key_heads}];
  if (results.empty())
    results =
        one_process(make_problem(one.cu_seqlens().back(), key_heads, at::kDouble), one.cu_seqlens(), causal);
  return results;
}

// In fp64 and in another type, the inputs rounded to it: the same on every rank and mesh, too.
struct Rounded {
  Results exact, alone;
};
const Rounded& rounded(const ContextCase& one, at::ScalarType type, bool causal, std::int64_t key_heads) {
  static std::mutex mutex;
  static std::map<std::tuple<std::string, at::ScalarType, bool, std::int64_t>, Rounded> known;
  const std::lock_guard lock(mutex);
  Rounded& results = known[{one.name, type, causal, key_heads}];
  if (results.exact.empty()) {
    const auto ends = one.cu_seqlens();
    const Problem problem = make_problem(ends.back(), key_heads, type);
    const Problem exact{problem.q.to(at::kDouble), problem.k.to(at::kDouble), problem.v.to(at::kDouble),
                        problem.weight.to(at::kDouble)};
    results.exact = one_process(exact, ends, causal);
    results.alone = run([&](const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v) { return variable_length_attention(q, k, v, ends, causal); },
                        problem);
  }
  return results;
}

// A rank's part; what fills it up is NaN, which nothing may see.
Problem part_of(const Problem& problem, const std::vector<std::int64_t>& rows, double padding) {
  const at::Tensor index = at::tensor(rows, at::kLong);
  const auto take = [&](const at::Tensor& x) {
    at::Tensor part = x.index_select(0, index.clamp_min(0));
    return part.masked_fill_(index.lt(0).view({-1, 1, 1}), padding);
  };
  return {take(problem.q), take(problem.k), take(problem.v), take(problem.weight)};
}

using Attend = std::function<at::Tensor(const ContextGroups&, const ContextAttention&, const Batch&,
                                        const at::Tensor&, const at::Tensor&, const at::Tensor&)>;

at::Tensor right(const ContextGroups&, const ContextAttention& attention, const Batch& batch,
                 const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  return attention(batch, q, k, v);
}

Batch batch_of(const ContextCut& cut, int rank) {
  Batch batch;
  auto own = std::make_shared<ContextCut>(cut);
  own->rank = rank;
  for (const Piece& piece : own->own()) batch.cu_seqlens.push_back(batch.cu_seqlens.back() + piece.length);
  batch.cut = own;
  return batch;
}

// On every rank of a groups, then put together; rows of padding are left out.
Results distributed(const ContextGroups& groups, const ContextAttention& attention, const Problem& problem,
                    const ContextCut& cut, const Attend& attend = right, double padding = std::nan("")) {
  const int rank = groups.context.rank();
  const Batch batch = batch_of(cut, rank);
  const auto rows = rows_of(cut, rank);
  const Results own = run([&](const at::Tensor& q, const at::Tensor& k,
                              const at::Tensor& v) { return attend(groups, attention, batch, q, k, v); },
                          part_of(problem, rows, padding));
  Results all;
  Group context = groups.context;
  const at::Tensor places = context.all_gather_rows(at::tensor(rows, at::kLong));
  const at::Tensor real = places.ge(0).nonzero().squeeze(1);
  for (const at::Tensor& x : own) {
    const at::Tensor gathered = context.all_gather_rows(x.contiguous());
    at::Tensor whole = x.new_full({problem.q.size(0), x.size(1), x.size(2)}, std::nan(""));
    all.push_back(whole.index_copy_(0, places.index_select(0, real), gathered.index_select(0, real)));
  }
  return all;
}

double relative(const at::Tensor& a, const at::Tensor& b) {
  const double error = (a.to(at::kDouble) - b.to(at::kDouble)).norm().item<double>();
  const double size = b.to(at::kDouble).norm().item<double>();
  return std::isnan(error) ? HUGE_VAL : size > 0 ? error / size : error;
}

double worst(const Results& results, const Results& wanted) {
  double error = 0;
  for (std::size_t i = 0; i < wanted.size(); ++i) error = std::max(error, relative(results[i], wanted[i]));
  return error;
}

std::vector<std::int64_t> key_heads_for(const ContextSizes& sizes) {
  std::vector<std::int64_t> result;
  for (const std::int64_t key_heads : {12, 4, 2, 1}) {
    const auto possible = possible_ulysses(kHeads, key_heads);
    if (std::find(possible.begin(), possible.end(), sizes.ulysses) != possible.end())
      result.push_back(key_heads);
  }
  return result;
}

ContextGroups groups_of(const World& world, const ContextSizes& sizes) {
  return context_groups(
      Mesh(world, data_grid(world.size, {.cp_ring = sizes.ring, .cp_ulysses = sizes.ulysses})));
}

// E1: the allowance is that of gradients. Each with the fast attention and with the naive twin.
TEST(ContextAttention, IsThatOfOneProcess) {
  int cases = 0;
  double largest = 0, largest_naive = 0;
  for (const ContextSizes& sizes : kContextSizes) {
    std::mutex mutex;
    run_ranks(sizes.ranks(), [&](World& world) {
      const ContextGroups groups = groups_of(world, sizes);
      for (const bool causal : {true, false}) {
        const ContextAttention attention(groups, causal);
        for (const ContextCase& one : kContextCases)
          for (const std::int64_t key_heads : key_heads_for(sizes)) {
            const Problem problem = make_problem(one.cu_seqlens().back(), key_heads, at::kDouble);
            const Results& wanted = one_process(one, causal, key_heads);
            const ContextCut cut = one.cut(sizes, causal);
            const double error = worst(distributed(groups, attention, problem, cut), wanted);
            const Results twin = distributed(
                groups, attention, problem, cut,
                [&](const ContextGroups& own, const ContextAttention&, const Batch& batch,
                    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
                  return naive_context_attention(own.context, batch, q, k, v, causal);
                },
                7);  // it multiplies what it must not see by 0
            const double naive_error = worst(twin, wanted);
            EXPECT_LT(error, 1e-10) << sizes.name() << ", " << one.name << ", causal " << causal
                                    << ", key heads " << key_heads;
            EXPECT_LT(naive_error, 1e-10) << sizes.name() << ", " << one.name << ", causal " << causal;
            if (world.rank == 0) {
              const std::lock_guard lock(mutex);
              ++cases;
              largest = std::max(largest, error), largest_naive = std::max(largest_naive, naive_error);
            }
          }
      }
    });
  }
  std::printf("%d cases, largest error %.1e, of the naive twin %.1e (allowed 1e-10)\n", cases, largest,
              largest_naive);
}

// Doing nothing must not pass, nor losing a boundary between documents (B20), wherever there is one to lose.
TEST(ContextAttention, PlantedMistakesAreSeen) {
  for (const ContextSizes& sizes : kContextSizes)
    run_ranks(sizes.ranks(), [&](World& world) {
      const ContextGroups groups = groups_of(world, sizes);
      for (const bool causal : {true, false}) {
        const ContextAttention attention(groups, causal);
        for (const ContextCase& one : kContextCases) {
          if (one.cu_seqlens().back() < 2) continue;  // nothing to cut
          const Problem problem = make_problem(one.cu_seqlens().back(), 12, at::kDouble);
          const Results& wanted = one_process(one, causal, 12);
          const ContextCut cut = one.cut(sizes, causal);
          const auto mistake = [&](const char* name, const Attend& attend) {
            const double error = worst(distributed(groups, attention, problem, cut, attend), wanted);
            EXPECT_GT(error, 1e-3) << name << ", " << sizes.name() << ", " << one.name;
          };
          const bool any_cut = [&] {
            std::vector<int> parts(one.lengths.size());
            for (const auto& pieces : cut.pieces)
              for (const Piece& piece : pieces)
                if (piece.document < static_cast<std::int64_t>(parts.size()) &&
                    ++parts[static_cast<std::size_t>(piece.document)] > 1)
                  return true;
            return false;
          }();
          if (any_cut)
            mistake("local attention alone",
                    [&](const ContextGroups&, const ContextAttention&, const Batch& batch,
                        const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
                      return variable_length_attention(q, k, v, batch.cu_seqlens, causal);
                    });
          const auto joined = joined_across_shards(cut);
          bool loses = false;
          for (std::size_t r = 0; r < cut.pieces.size(); ++r)
            for (std::size_t p = 0; p < cut.pieces[r].size(); ++p)
              loses |= joined->pieces[r][p].document != cut.pieces[r][p].document;
          if (loses)
            mistake("B20", [&](const ContextGroups&, const ContextAttention& over, const Batch& batch,
                               const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
              auto wrong = std::make_shared<ContextCut>(*joined);
              wrong->rank = batch.cut->rank;
              Batch leaky = batch;
              leaky.cut = wrong;
              return over(leaky, q, k, v);
            });
          // Otherwise this test shows nothing.
          EXPECT_TRUE(any_cut || one.name == "packs of many") << sizes.name() << ", " << one.name;
          EXPECT_TRUE(loses || one.lengths.size() == 1) << sizes.name() << ", " << one.name;
        }
      }
    });
}

// A change in one document leaves the output and gradients of every other one as they were, bit for bit.
TEST(ContextAttention, NothingLeaksBetweenDocuments) {
  for (const ContextSizes& sizes : kContextSizes)
    run_ranks(sizes.ranks(), [&](World& world) {
      const ContextGroups groups = groups_of(world, sizes);
      for (const bool causal : {true, false}) {
        const ContextAttention attention(groups, causal);
        for (const ContextCase& one : kContextCases) {
          if (one.lengths.size() < 3) continue;
          const auto ends = one.cu_seqlens();
          const ContextCut cut = one.cut(sizes, causal);
          const Problem problem = make_problem(ends.back(), 12, at::kFloat);
          const Results before = distributed(groups, attention, problem, cut);
          for (std::size_t victim = 0; victim + 1 < ends.size(); victim += 2) {
            if (ends[victim] == ends[victim + 1]) continue;
            Problem changed = problem;
            for (at::Tensor* x : {&changed.q, &changed.k, &changed.v, &changed.weight}) {
              *x = x->clone();
              x->slice(0, ends[victim], ends[victim + 1]).mul_(-3).add_(1);
            }
            const Results after = distributed(groups, attention, changed, cut);
            for (std::size_t d = 0; d + 1 < ends.size(); ++d)
              for (std::size_t i = 0; i < before.size(); ++i) {
                const bool same =
                    before[i].slice(0, ends[d], ends[d + 1]).equal(after[i].slice(0, ends[d], ends[d + 1]));
                // At least the output of the changed document differs.
                EXPECT_TRUE(d == victim ? i > 0 || !same : same)
                    << sizes.name() << ", " << one.name << ", document " << d << " of " << victim
                    << ", result " << i;
              }
          }
        }
      }
    });
}

// E2: against one process in the same precision, both measured against fp64.
TEST(ContextAttention, WithinRoundingInLowerPrecision) {
  for (const ContextSizes& sizes : kContextSizes)
    run_ranks(sizes.ranks(), [&](World& world) {
      const ContextGroups groups = groups_of(world, sizes);
      const bool causal = sizes.ring != 3;  // one of them both ways
      const ContextAttention attention(groups, causal);
      for (const auto& [type, unit] :
           {std::pair{at::kFloat, std::ldexp(1.0, -24)}, {at::kBFloat16, std::ldexp(1.0, -8)}})
        for (const ContextCase& one : kContextCases)
          for (const std::int64_t key_heads : key_heads_for(sizes)) {
            const Problem problem = make_problem(one.cu_seqlens().back(), key_heads, type);
            const auto& [wanted, alone] = rounded(one, type, causal, key_heads);
            const Results results = distributed(groups, attention, problem, one.cut(sizes, causal));
            for (std::size_t i = 0; i < wanted.size(); ++i)
              EXPECT_LE(relative(results[i], wanted[i]),
                        4 * relative(alone[i], wanted[i]) + unit * std::sqrt(sizes.ranks()))
                  << sizes.name() << ", " << one.name << ", " << c10::toString(type) << ", result " << i;
          }
    });
}

// A rank sends the keys that somebody further on needs, and nothing else.
TEST(ContextAttention, MovesWhatIsNeeded) {
  constexpr std::int64_t kRow = 12 * kHeadDim * 2 * 8;  // bytes of a token's keys and values in fp64
  const auto sent = [](const ContextGroups& groups) {
    const auto traffic = groups.ring.traffic();
    const auto place = traffic.operations.find("send");
    return place == traffic.operations.end() ? 0 : place->second.bytes;
  };
  run_ranks(2, [&](World& world) {
    for (const bool whole : {true, false}) {
      const ContextGroups groups = groups_of(world, {2, 1});
      const ContextAttention attention(groups);
      const std::vector<std::int64_t> ends =
          whole ? std::vector<std::int64_t>{0, 16, 32, 48, 64} : std::vector<std::int64_t>{0, 64};
      const std::int64_t before = sent(groups);
      const Problem problem = make_problem(64, 12, at::kDouble);
      distributed(groups, attention, problem, cut_documents(ends, {.ring = 2}));
      // One document in four chunks of 16: rank 0 has the first and the last, of which rank 1 needs the
      // first; rank 1's two are needed by the last. In backward again, and their gradients back.
      const std::int64_t rows = whole ? 0 : world.rank == 0 ? 16 + 16 + 32 : 32 + 32 + 16;
      EXPECT_EQ(sent(groups) - before, rows * kRow) << "rank " << world.rank;
    }
  });
}

TEST(ContextAttention, SameBitsRunToRun) {
  for (const ContextSizes& sizes : {ContextSizes{4, 1}, {2, 2}})
    run_ranks(sizes.ranks(), [&](World& world) {
      const ContextGroups groups = groups_of(world, sizes);
      const ContextAttention attention(groups);
      const ContextCase& one = kContextCases[3];
      const Problem problem = make_problem(one.cu_seqlens().back(), 2, at::kFloat);
      const ContextCut cut = one.cut(sizes, true);
      const Results first = distributed(groups, attention, problem, cut);
      for (int again = 0; again < 5; ++again) {
        const Results now = distributed(groups, attention, problem, cut);
        for (std::size_t i = 0; i < first.size(); ++i) EXPECT_TRUE(now[i].equal(first[i]));
      }
    });
}

TEST(ContextAttention, BadInputIsNamedOnEveryRank) {
  run_ranks(4, [&](World& world) {
    EXPECT_THAT(error_of([&] { data_grid(world.size, {.cp_ring = 3}); }), HasSubstr("1, 2, 4"));
    EXPECT_THAT(error_of([&] { data_grid(world.size, {.dp_replicate = 2, .cp_ring = 2, .cp_ulysses = 2}); }),
                HasSubstr("dp_replicate 2 x cp_ring 2 x cp_ulysses 2 for 4 ranks"));
    const auto said = [&](const ContextGroups& groups, const ContextCut& cut, std::int64_t heads,
                          std::int64_t key_heads) {
      const ContextAttention attention(groups);
      const int rank = groups.context.rank();
      const auto make = [&](std::int64_t n) { return at::ones({cut.tokens_of(rank), n, kHeadDim}); };
      return error_of([&] { attention(batch_of(cut, rank), make(heads), make(key_heads), make(key_heads)); });
    };
    const ContextGroups ulysses = groups_of(world, {1, 4}), ring = groups_of(world, {4, 1});
    const ContextCut by_heads = cut_documents({0, 20}, {.ulysses = 4}),
                     by_ring = cut_documents({0, 20}, {.ring = 4});
    // Four ranks for three key heads.
    EXPECT_THAT(said(ulysses, by_heads, 12, 3), HasSubstr("one of 1, 3, 6, 12"));
    // One rank with another model or cut; agreement_test has the other faults.
    const bool odd = world.rank == 2;
    EXPECT_THAT(said(ring, by_ring, odd ? 8 : 4, 4), HasSubstr("context rank 2: 8 query heads"));
    EXPECT_THAT(said(ring, by_ring, 4, odd ? 2 : 4), HasSubstr("context rank 2"));
    const ContextCut other = cut_documents({0, 10, 20}, {.ring = 4, .level = false});
    EXPECT_THAT(said(ring, odd ? other : by_ring, 4, 4), HasSubstr("context rank 2"));
  });
}

}  // namespace
}  // namespace isograd
