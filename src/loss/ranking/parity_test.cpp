// Any number of ranks, any cut of the batch: loss and parameter gradients of a scorer are one process's. And
// how many bytes that takes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "isograd/error.hpp"
#include "isograd/world.hpp"
#include "loss/ranking/ranking_cases.hpp"

namespace isograd {
namespace {

using namespace ranking_cases;

class RankingAt : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, RankingAt, ::testing::Values(1, 2, 3, 4, 5, 8));

constexpr int kSteps = 4;
constexpr double kAllowed = 1e-10;

// A step of a case as one process makes it.
struct Expected {
  Step step;
  Wanted wanted;
  RankingLoss::State after;
};

// Once for all ranks. The queue of a loss alone is what the twin is given.
std::vector<Expected> expected_alone(const Case& test, int ranks) {
  std::vector<Expected> all;
  const auto alone = test.family.make(test.options, Group::solo());
  for (int number = 0; number < kSteps; ++number) {
    const Step step = make_step(test.cut, ranks, test.options.num_classes, number);
    const Wanted wanted = one_process(test.family, test.options, step, test.weighted, alone->state());
    alone->forward(Scorer(test.options.num_classes)(step.x).detach(), step.targets,
                   extras_of(step, 0, step.targets.numel(), test.weighted));
    RankingLoss::State after;
    for (const auto& [name, values] : alone->state()) after.emplace_back(name, values.clone());
    all.push_back({step, wanted, after});
  }
  return all;
}

TEST_P(RankingAt, LossAndParameterGradientsAreOneProcesss) {
  const int ranks = GetParam();
  std::map<Cut, int> differentiated, all_steps;  // a test that compares zeros only shows nothing
  std::vector<std::pair<Case, std::vector<Expected>>> cases;
  for_each_case([&](const Case& test) { cases.emplace_back(test, expected_alone(test, ranks)); });
  run_ranks(ranks, [&](World& world) {
    for (const auto& [test, steps] : cases) {
      const auto loss = test.family.make(test.options, world.group);
      for (std::size_t number = 0; number < steps.size(); ++number) {
        const auto& [step, wanted, of_one] = steps[number];
        const auto begin =
            std::accumulate(step.rows.begin(), step.rows.begin() + world.rank, std::int64_t{0});
        const std::int64_t rows = step.rows[static_cast<std::size_t>(world.rank)];
        if (world.rank == 0) ++all_steps[test.cut];
        const Scorer scorer(test.options.num_classes);
        const at::Tensor value =
            total(loss->forward(scorer(step.x.narrow(0, begin, rows)), step.targets.narrow(0, begin, rows),
                                extras_of(step, begin, rows, test.weighted)));
        ASSERT_NEAR(value.item<double>(), wanted.loss, kAllowed) << test.text;
        std::vector<at::Tensor> sum = scorer.gradients(value);
        for (auto& gradient : sum) world.group.all_reduce(gradient);
        ASSERT_LT(distance(sum, wanted.gradients), kAllowed) << test.text << " step " << number;
        if (wanted.gradients[0].norm().item<double>() > 1e-6) {
          if (world.rank == 0) ++differentiated[test.cut];
          // Planted fault (museum B24): the gradients averaged instead.
          std::vector<at::Tensor> average;
          for (const auto& gradient : sum) average.push_back(gradient / ranks);
          if (ranks > 1) {
            ASSERT_GT(distance(average, wanted.gradients), kAllowed);
          }
          ASSERT_NEAR(ratio(average, wanted.gradients), 1.0 / ranks, 1e-9) << test.text;
        }
        const auto mine = loss->state();
        for (std::size_t i = 0; i < mine.size(); ++i)
          ASSERT_TRUE(mine[i].second.equal(of_one[i].second) ||
                      mine[i].second.allclose(of_one[i].second, 1e-12, 1e-14))
              << test.text << ": " << mine[i].first;
      }
    }
  });
  const auto part = [&](Cut cut) { return double(differentiated[cut]) / all_steps[cut]; };
  EXPECT_GT(part(Cut::kEven), 0.43);
  EXPECT_GT(part(Cut::kUneven), 0.26);
  EXPECT_GT(part(Cut::kPositivesOnOneRank), 0.26);
}

TEST_P(RankingAt, TheMeanSettingIsExactUnderAnAverage) {
  const int ranks = GetParam();
  run_ranks(ranks, [&](World& world) {
    for (const Family& family : families()) {
      RankingOptions options;
      options.temperature = 0.4, options.queue_size = 0, options.grad_reduction = GradReduction::kMean;
      const Step step = make_step(Cut::kUneven, ranks, 1, 3);
      const auto begin = std::accumulate(step.rows.begin(), step.rows.begin() + world.rank, std::int64_t{0});
      const std::int64_t rows = step.rows[static_cast<std::size_t>(world.rank)];
      const auto loss = family.make(options, world.group);
      const Wanted wanted = one_process(family, options, step, true, loss->state());
      const Scorer scorer(1);
      const at::Tensor value =
          loss->forward(scorer(step.x.narrow(0, begin, rows)), step.targets.narrow(0, begin, rows),
                        extras_of(step, begin, rows, true));
      EXPECT_NEAR(value.item<double>(), wanted.loss, kAllowed);
      std::vector<at::Tensor> average = scorer.gradients(value);
      for (auto& gradient : average) world.group.all_reduce(gradient), gradient /= ranks;
      EXPECT_LT(distance(average, wanted.gradients), kAllowed) << family.name;
    }
  });
}

// docs/ranking.md, "The rule": scored without gradient, ranked as one, scored again by micro-batches.
TEST_P(RankingAt, AStepOfSeveralMicroBatchesIsRankedAsOne) {
  const int ranks = GetParam();
  run_ranks(ranks, [&](World& world) {
    for (const Family& family : families()) {
      RankingOptions options;
      options.temperature = 0.4, options.queue_size = 0;
      const Step step = make_step(Cut::kUneven, ranks, 1, 3);
      const auto begin = std::accumulate(step.rows.begin(), step.rows.begin() + world.rank, std::int64_t{0});
      const std::int64_t rows = step.rows[static_cast<std::size_t>(world.rank)], half = rows / 2;
      const auto loss = family.make(options, world.group);
      const Wanted wanted = one_process(family, options, step, false, loss->state());
      const Scorer scorer(1);
      const at::Tensor x = step.x.narrow(0, begin, rows), all = leaf(scorer(x));
      loss->forward(all, step.targets.narrow(0, begin, rows)).backward();
      const auto again = [&](std::int64_t from, std::int64_t count) {
        return scorer.gradients((scorer(x.narrow(0, from, count)) * all.grad().narrow(0, from, count)).sum());
      };
      auto sum = again(0, half);
      const auto rest = again(half, rows - half);
      for (std::size_t i = 0; i < sum.size(); ++i) world.group.all_reduce(sum[i] += rest[i]);
      EXPECT_LT(distance(sum, wanted.gradients), kAllowed) << family.name;
    }
  });
}

TEST_P(RankingAt, AForwardMovesTheDocumentedMinimum) {
  const int ranks = GetParam();
  run_ranks(ranks, [&](World& world) {
    for (const Family& family : families()) {
      if (family.selects) continue;  // selection_test.cpp
      for (const std::int64_t classes : {1, 3})
        for (const bool weighted : {false, true})
          for (const bool differentiated : {false, true}) {
            RankingOptions options;
            options.num_classes = classes, options.queue_size = 16, options.temperature = 0.4;
            const Step step = make_step(Cut::kUneven, ranks, classes, 3);
            const auto begin =
                std::accumulate(step.rows.begin(), step.rows.begin() + world.rank, std::int64_t{0});
            const std::int64_t rows = step.rows[static_cast<std::size_t>(world.rank)];
            const auto loss = family.make(options, world.group);
            const at::Tensor scores = Scorer(classes)(step.x.narrow(0, begin, rows)).detach().to(at::kFloat);
            if (differentiated) scores.requires_grad_(true);
            const Traffic before = world.group.traffic();
            const at::Tensor value = loss->forward(scores, step.targets.narrow(0, begin, rows),
                                                   extras_of(step, begin, rows, weighted));
            if (differentiated) value.backward();  // moves nothing
            Traffic after = world.group.traffic();
            if (ranks == 1) {
              EXPECT_EQ(after.bytes(), before.bytes());
              continue;
            }
            const auto moved = [&](const char* name) {
              const auto was = before.operations.find(name);
              Traffic::Operation op = after.operations[name];
              if (was != before.operations.end())
                op.calls -= was->second.calls, op.bytes -= was->second.bytes;
              return std::pair(op.calls, op.bytes);
            };
            const auto part = [&](std::int64_t whole) { return whole * (ranks - 1) / ranks; };
            const std::int64_t n = step.targets.ne(-100).sum().item<std::int64_t>();
            const std::int64_t row = 4 * classes + (classes == 1 ? 1 : 4) + (weighted ? 8 : 0);
            EXPECT_EQ(moved("all_gather"), std::pair(std::int64_t{2}, part(88 * ranks) + part(n * row)));
            const bool scatters = family.dealt && differentiated, reduces = family.dealt && !differentiated;
            EXPECT_EQ(moved("reduce_scatter"),
                      scatters ? std::pair(std::int64_t{1}, part(4 * classes * (n + 3 * ranks)))
                               : std::pair(std::int64_t{0}, std::int64_t{0}));
            EXPECT_EQ(moved("all_reduce"), reduces ? std::pair(std::int64_t{1}, part(2 * 8 * 3 * classes))
                                                   : std::pair(std::int64_t{0}, std::int64_t{0}))
                << family.name;
          }
    }
  });
}

// Without the gather each rank ranks its own rows: another loss, whatever the factor.
TEST(Ranking, OfOnesOwnRowsAloneIsSeen) {
  run_ranks(4, [](World& world) {
    const Family family = families()[0];
    RankingOptions options;
    options.temperature = 0.4, options.queue_size = 0;
    const Step step = make_step(Cut::kEven, 4, 1, 2);
    const auto alone = family.make(options, Group::solo());
    const Wanted wanted = one_process(family, options, step, false, alone->state());
    const Scorer scorer(1);
    const std::int64_t begin = 6 * world.rank;
    auto own = scorer.gradients(
        alone->forward(scorer(step.x.narrow(0, begin, 6)), step.targets.narrow(0, begin, 6)));
    double norm = 0, product = 0, size = 0;
    for (std::size_t i = 0; i < own.size(); ++i) {
      world.group.all_reduce(own[i]);
      norm += own[i].square().sum().item<double>(), size += wanted.gradients[i].square().sum().item<double>();
      product += (own[i] * wanted.gradients[i]).sum().item<double>();
    }
    EXPECT_LT(product / std::sqrt(norm * size), 0.99);
  });
}

}  // namespace
}  // namespace isograd
