// The recipe's worked example and its tables, whose numbers stand here as the recipe prints them.
#include "plan/search.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error_testing.hpp"

namespace isograd::planner {
namespace {

using error_testing::error_of;
using ::testing::HasSubstr;

const Work kExample{.tokens = 4194304, .sequence = 4096};

TEST(PlannerRecipe, IsTheWorkedExample) {
  const BatchNumbers small = batch_numbers(kExample, 2, 128), large = batch_numbers(kExample, 2, 512);
  EXPECT_EQ(small.samples, 1024);
  EXPECT_EQ(small.accumulation, 4);
  EXPECT_EQ(large.accumulation, 1);
  EXPECT_FALSE(small.too_many_ranks);
  EXPECT_FALSE(large.too_many_ranks);
  EXPECT_EQ(batch_numbers(kExample, 2, 100).accumulation, 6);  // 5.12, and a last one that is not full
}

TEST(PlannerRecipe, HasThreeAnswersToMoreRanksThanTheBatchHas) {
  const BatchNumbers rich = batch_numbers(kExample, 2, 1024);
  EXPECT_TRUE(rich.too_many_ranks);
  EXPECT_EQ(rich.accumulation, 1);
  EXPECT_EQ(rich.fewer_ranks, 512);
  EXPECT_EQ(rich.larger_batch, 8388608);
  EXPECT_EQ(rich.smaller_micro_batch, 1);
  // Each answer is one: nobody accumulates, and no rank is idle.
  const auto answers = [](const Work& work, std::int64_t micro_batch, std::int64_t ranks) {
    const BatchNumbers numbers = batch_numbers(work, micro_batch, ranks);
    return numbers.accumulation == 1 && !numbers.too_many_ranks && numbers.samples == micro_batch * ranks;
  };
  EXPECT_TRUE(answers(kExample, 2, rich.fewer_ranks));
  EXPECT_TRUE(answers({.tokens = rich.larger_batch, .sequence = 4096}, 2, 1024));
  EXPECT_TRUE(answers(kExample, rich.smaller_micro_batch, 1024));
  EXPECT_EQ(batch_numbers(kExample, 1, 4096).smaller_micro_batch, 0);
  EXPECT_EQ(batch_numbers(kExample, std::int64_t{1} << 40, std::int64_t{1} << 40).accumulation, 1);
}

TEST(PlannerRecipe, HasTheTablesOfMemoryAndTraffic) {
  const std::vector<ZeroRow> rows = zero_table(64);
  ASSERT_EQ(rows.size(), 4u);
  const double kept[] = {16, 4.1875, 2.21875, 0.25}, sent[] = {2, 2, 2, 3},
               isograd_kept[] = {18, 6.1875, 2.25, 0.28125};
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(rows[i].kept, kept[i]) << rows[i].strategy;
    EXPECT_DOUBLE_EQ(rows[i].sent, sent[i]) << rows[i].strategy;
    EXPECT_EQ(rows[i].isograd_kept, isograd_kept[i]) << rows[i].strategy;
  }
  EXPECT_EQ(rows[0].kept_with_fp32_gradients, 20);
  EXPECT_EQ(rows[0].strategy, "bucketed");
  EXPECT_EQ(rows[2].kept_formula, "2\u03a8 + 14\u03a8/N");
  EXPECT_EQ(zero_table(1)[3].sent, 0);
  EXPECT_THAT(error_of([] { zero_table(0); }), HasSubstr("ranks"));
}

TEST(PlannerRecipe, RefusesWhatIsNoBatch) {
  EXPECT_THAT(error_of([] { batch_numbers(kExample, 0, 8); }), HasSubstr("micro-batch"));
  EXPECT_THAT(error_of([] { batch_numbers(kExample, 1, 0); }), HasSubstr("data ranks"));
  EXPECT_THAT(error_of([] { batch_numbers({.tokens = 0}, 1, 8); }), HasSubstr("tokens"));
}

}  // namespace
}  // namespace isograd::planner
