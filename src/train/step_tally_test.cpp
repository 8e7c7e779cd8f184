// What a step counts beside the loss: StepOptions::tally.
#include <gtest/gtest.h>

#include "isograd/step.hpp"
#include "isograd/world.hpp"
#include "toy.hpp"

namespace isograd {
namespace {

struct Counted {
  std::vector<StepReport> reports{};
  std::int64_t calls = 0;  // of collectives
};

// Two steps of `size` ranks, each of which counts its rank, its tokens, and one thing between the steps.
Counted counted(int size, bool with_tally) {
  Counted result;
  const auto batches = toy::make_step(size, 2);
  run_ranks(size, [&](World& world) {
    toy::Model model;
    std::vector<double> counts = {0, 0};
    const auto optimizer = sgd({.learning_rate = 0});
    const auto layout = bucketed(trainable_parameters(model.named()), world.group, {.bucket_bytes = 300});
    TokenMean mean;
    StepOptions options;
    if (with_tally) options.tally = [&] { return std::exchange(counts, {0, 0}); };
    Step step(
        [&](const Batch& batch) -> LossTerms {
          counts[0] += world.rank + 1;
          counts[1] += static_cast<double>(batch.num_tokens());
          return {{"cross_entropy", cross_entropy_sum(model.logits(batch), batch.targets)}};
        },
        *layout, mean, *optimizer, options);
    for (int i = 0; i < 2; ++i) {
      const StepReport report = step(batches[static_cast<std::size_t>(world.rank)]);
      counts[0] += 1000;  // of a forward that is no step's
      if (world.rank == 0) result.reports.push_back(report);
    }
    if (world.rank > 0) return;
    for (const auto& [name, operation] : world.group.traffic().operations) result.calls += operation.calls;
  });
  return result;
}

TEST(StepTally, IsAddedUpOverTheRanksAndCostsNoCollective) {
  for (const int size : {1, 2, 3}) {
    const auto batches = toy::make_step(size, 2);
    double ranks = 0;
    for (int rank = 0; rank < size; ++rank)
      ranks += (rank + 1) * static_cast<double>(batches[static_cast<std::size_t>(rank)].size());
    const Counted with = counted(size, true), without = counted(size, false);
    for (const StepReport& report : with.reports) {
      ASSERT_EQ(report.tally.size(), 2u);
      EXPECT_EQ(report.tally[0], ranks) << size;
      EXPECT_EQ(report.tally[1], static_cast<double>(report.census.tokens)) << size;
      ASSERT_EQ(report.terms.size(), 1u);
      EXPECT_EQ(report.loss, without.reports[0].loss);
      EXPECT_EQ(report.norm, without.reports[0].norm);
    }
    EXPECT_TRUE(without.reports[0].tally.empty());
    EXPECT_EQ(with.calls, without.calls) << size;
    EXPECT_EQ(with.calls > 0, size > 1);
  }
}

}  // namespace
}  // namespace isograd
