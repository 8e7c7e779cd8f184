#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <numeric>
#include <random>

#include "parallel/context/context_testing.hpp"

namespace isograd {
namespace {

using namespace testing;
using ::testing::HasSubstr;

std::vector<std::int64_t> ends_of(const std::vector<std::int64_t>& lengths) {
  return ContextCase{.name = "", .lengths = lengths}.cu_seqlens();
}

// Tokens say which document and place they come from.
Batch make_batch(const std::vector<std::int64_t>& lengths) {
  Batch batch;
  std::vector<std::int64_t> tokens, targets, positions;
  for (std::size_t d = 0; d < lengths.size(); ++d) {
    for (std::int64_t i = 0; i < lengths[d]; ++i) {
      tokens.push_back(static_cast<std::int64_t>(d) * 1000 + i);
      targets.push_back(i + 1 < lengths[d] ? tokens.back() + 1 : kIgnoreIndex);
      positions.push_back(i);
    }
    batch.cu_seqlens.push_back(batch.cu_seqlens.back() + lengths[d]);
    batch.sample_ids.push_back(static_cast<std::int64_t>(d) + 50);
    batch.sample_targets.push_back(std::max<std::int64_t>(0, lengths[d] - 1));
  }
  batch.tokens = at::tensor(tokens, at::kLong);
  batch.targets = at::tensor(targets, at::kLong);
  batch.positions = at::tensor(positions, at::kLong);
  batch.weights = at::arange(batch.num_tokens(), at::kDouble) + 1;
  return batch;
}

TEST(ContextCut, EveryTokenOnceWithItsTargetAndSample) {
  EXPECT_TRUE(rc::check("any documents, any axes", [] {
    std::vector<std::int64_t> lengths;
    for (int i = *rc::gen::inRange(0, 9); i > 0; --i) lengths.push_back(*rc::gen::inRange(0, 40));
    CutOptions options{.ring = *rc::gen::inRange(1, 6),
                       .ulysses = *rc::gen::inRange(1, 4),
                       .causal = *rc::gen::arbitrary<bool>(),
                       .level = *rc::gen::arbitrary<bool>(),
                       .token_cost = *rc::gen::inRange(0, 3) * 100,
                       .pad_to_multiple = *rc::gen::inRange(0, 3) * 4};
    const Batch whole = make_batch(lengths);
    const ContextCut cut = cut_documents(whole.cu_seqlens, options);
    RC_ASSERT(static_cast<int>(cut.pieces.size()) == options.ring * options.ulysses);
    std::vector<int> seen(static_cast<std::size_t>(whole.num_tokens()));
    std::vector<int> fragments(lengths.size());
    std::int64_t padding = 0;
    for (int rank = 0; rank < options.ring * options.ulysses; ++rank) {
      const Batch part = cut_batch(whole, cut, rank);
      const auto rows = rows_of(cut, rank);
      RC_ASSERT(part.num_tokens() == static_cast<std::int64_t>(rows.size()));
      RC_ASSERT(part.tokens.numel() == part.num_tokens());
      if (options.pad_to_multiple > 0) {
        RC_ASSERT(part.num_tokens() % options.pad_to_multiple == 0);
        RC_ASSERT(part.num_tokens() == cut.tokens_of(0));
      }
      RC_ASSERT(part.cut->rank == rank);
      RC_ASSERT(part.num_fragments() == static_cast<std::int64_t>(cut.pieces[rank].size()));
      for (std::int64_t f = 0; f < part.num_fragments(); ++f) {
        const Piece& piece = part.cut->own()[f];
        for (std::int64_t t = part.cu_seqlens[f]; t < part.cu_seqlens[f + 1]; ++t) {
          const std::int64_t row = rows[t];
          if (row < 0) {
            ++padding;
            RC_ASSERT(part.sample_ids[f] == kPaddingSample);
            RC_ASSERT(part.targets[t].item<std::int64_t>() == kIgnoreIndex);
            RC_ASSERT(part.weights[t].item<double>() == 0);
            continue;
          }
          ++seen[row];
          const std::int64_t position = piece.begin + t - part.cu_seqlens[f];
          RC_ASSERT(part.tokens[t].item<std::int64_t>() == piece.document * 1000 + position);
          RC_ASSERT(part.positions[t].item<std::int64_t>() == position);
          RC_ASSERT(part.targets[t].item<std::int64_t>() == whole.targets[row].item<std::int64_t>());
          RC_ASSERT(part.weights[t].item<double>() == static_cast<double>(row + 1));
          RC_ASSERT(part.sample_ids[f] == piece.document + 50);
          RC_ASSERT(part.sample_targets[f] == whole.sample_targets[piece.document]);
        }
        if (part.sample_ids[f] >= 0) ++fragments[part.sample_ids[f] - 50];
      }
    }
    RC_ASSERT(std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; }));
    // Empty documents, too, keep their sample.
    RC_ASSERT(std::all_of(fragments.begin(), fragments.end(), [](int n) { return n >= 1; }));
    const CutCost cost = cost_of(cut, options);
    RC_ASSERT(cost.padding == padding);
    RC_ASSERT(std::accumulate(cost.tokens.begin(), cost.tokens.end(), std::int64_t{0}) ==
              whole.num_tokens() + padding);
  }));
}

// Zigzag: of one long document every rank has the same tokens and, but for rounding, the same scores;
// assigned in as many chunks as ranks, the last of R would have (2R − 1)/R of the mean.
TEST(ContextCut, ZigzagLevelsOneDocument) {
  for (const int ring : {2, 3, 4, 5, 8})
    for (const bool level : {true, false}) {
      const CutOptions options{.ring = ring, .level = level};
      const CutCost cost = cost_of(cut_documents({0, 8192}, options), options);
      EXPECT_LT(cost.imbalance, 1.002) << describe(cost);
      const auto [least, most] = std::minmax_element(cost.tokens.begin(), cost.tokens.end());
      EXPECT_LE(*most - *least, 2);
      CutOptions straight = options;
      straight.causal = false;  // its assignment, with the costs of causal attention
      EXPECT_GT(cost_of(cut_documents({0, 8192}, straight), options).imbalance, 2 - 1.01 / ring);
    }
}

// Documents of very different lengths: costs are levelled, not token counts; the measured figures are
// printed next to those of a packer that levels tokens alone.
TEST(ContextCut, LevelsTheSumOfSquares) {
  std::mt19937 random(1);
  std::lognormal_distribution<double> length(6, 1.2);
  double worst = 1, worst_by_tokens = 1;
  std::string said;
  for (const int ring : {2, 4, 8})
    for (int trial = 0; trial < 20; ++trial) {
      std::vector<std::int64_t> lengths;
      for (std::int64_t total = 0; total < 32768; total += lengths.back())
        lengths.push_back(std::min<std::int64_t>(8192, 1 + static_cast<std::int64_t>(length(random))));
      for (const bool causal : {true, false}) {
        const CutOptions options{.ring = ring, .causal = causal};
        const CutCost cost = cost_of(cut_documents(ends_of(lengths), options), options);
        EXPECT_LT(cost.imbalance, 1.06) << describe(cost);
        if (cost.imbalance > worst) worst = cost.imbalance, said = describe(cost);
        // By tokens alone: whole documents to the rank with the fewest.
        ContextCut by_tokens{.cu_seqlens = ends_of(lengths), .pieces = {}, .rank = 0};
        by_tokens.pieces.resize(static_cast<std::size_t>(ring));
        for (std::size_t d = 0; d < lengths.size(); ++d) {
          int least = 0;
          for (int r = 1; r < ring; ++r)
            if (by_tokens.tokens_of(r) < by_tokens.tokens_of(least)) least = r;
          by_tokens.pieces[static_cast<std::size_t>(least)].push_back(
              {static_cast<std::int64_t>(d), 0, lengths[d]});
        }
        worst_by_tokens = std::max(worst_by_tokens, cost_of(by_tokens, options).imbalance);
      }
    }
  std::printf("highest cost over the mean, at worst: %.3f; levelling tokens alone %.3f\n%s\n", worst,
              worst_by_tokens, said.c_str());
  EXPECT_GT(worst_by_tokens, 1.5);  // so the test can tell
}

// Short documents stay whole: nothing of them travels.
TEST(ContextCut, ManyShortDocumentsAreNotCut) {
  const CutOptions options{.ring = 4};
  const CutCost cost = cost_of(cut_documents(ends_of(std::vector<std::int64_t>(64, 128)), options), options);
  EXPECT_EQ(cost.documents_cut, 0);
  EXPECT_EQ(cost.imbalance, 1);
}

// Cases of ranks with padding alone or without tokens are what they are called.
TEST(ContextCut, ARankHasOnlyPaddingOrNothing) {
  for (const ContextSizes& sizes : kContextSizes)
    for (const ContextCase* one : {&kContextCases[4], &kContextCases[5]}) {
      const ContextCut cut = one->cut(sizes, /*causal=*/true);
      int without_text = 0;
      for (int rank = 0; rank < sizes.ring * sizes.ulysses; ++rank) {
        const std::vector<std::int64_t> rows = rows_of(cut, rank);
        const bool text = std::ranges::any_of(rows, [](std::int64_t row) { return row >= 0; });
        without_text += !text;
        EXPECT_EQ(!rows.empty(), text || one->options.pad_to_multiple > 0) << one->name;
      }
      EXPECT_GT(without_text, 0) << one->name << ", " << sizes.ring << " x " << sizes.ulysses;
    }
}

TEST(ContextCut, BadInputIsNamed) {
  const CutOptions two{.ring = 2};
  EXPECT_THAT(error_of([&] { cut_documents({0, 5, 3, 9}, two); }), HasSubstr("[0, 5, 3, 9]"));
  EXPECT_THAT(error_of([&] { cut_documents({2, 5}, two); }), HasSubstr("ascend from 0"));
  EXPECT_THAT(error_of([&] { cut_documents({}, two); }), HasSubstr("ascend from 0"));
  EXPECT_THAT(error_of([&] { cut_documents({0, 5}, {.ring = 0}); }), HasSubstr("axes of 1 or more"));

  const Batch whole = make_batch({5, 4});
  Batch short_one = whole;
  short_one.cu_seqlens = {0, 5, 8};  // nine tokens
  EXPECT_THAT(error_of([&] {
                cut_batch(short_one, cut_documents({0, 5, 8}, two), 0);
              }),
              HasSubstr("9 tokens, 9 targets, 9 positions, cu_seqlens ending at 8"));
  const ContextCut cut = cut_documents(whole.cu_seqlens, two);
  EXPECT_THAT(error_of([&] { cut_batch(cut_batch(whole, cut, 0), cut, 0); }), HasSubstr("Cut it once"));

  const std::string much = error_of([] {
    cut_documents(ends_of({10, 4000, 30}), {.ring = 4, .most_tokens = 512});
  });
  EXPECT_THAT(much, HasSubstr("the longest document, 1, has 4000 of 4040"));
  EXPECT_THAT(much, HasSubstr("Use 8 context ranks or more"));

  // A rank's tokens count with their padding: 9 tokens of 18, filled up to 16.
  const auto padded = [](std::int64_t most_tokens, std::int64_t length = 18) {
    return error_of([&] {
      cut_documents({0, length}, {.ring = 2, .pad_to_multiple = 16, .most_tokens = most_tokens});
    });
  };
  EXPECT_THAT(padded(10), HasSubstr("16 tokens on one of 2 ranks, 7 of them padding"));
  EXPECT_THAT(padded(10), HasSubstr("Lower pad_to_multiple to 10 or less"));
  EXPECT_EQ(padded(16), "no error");
  EXPECT_THAT(padded(20, 40), HasSubstr("32 tokens on one of 2 ranks, 12 of them padding"));
  EXPECT_THAT(padded(20, 40), HasSubstr("Use 3 context ranks or more"));

  EXPECT_EQ(possible_ulysses(12, 4), (std::vector<int>{1, 2, 4, 12}));
  EXPECT_EQ(possible_ulysses(8, 2), (std::vector<int>{1, 2, 4, 8}));
}

}  // namespace
}  // namespace isograd
