// Lengths of pipelines: published bubble rates, long ones against the simulator, and what a rank has alive.
#include "plan/memory.hpp"

#include <gtest/gtest.h>

#include <array>
#include <numeric>

namespace isograd::planner {
namespace {

Candidate pipeline(Schedule schedule, int ranks, int stages_per_rank, std::int64_t micro_batches) {
  return {.ranks = ranks,
          .pp = ranks,
          .stages_per_rank = stages_per_rank,
          .schedule = schedule,
          .micro_batches = micro_batches};
}

// arXiv:2401.10241: milliseconds of Table 9, bubble rates of Table 5.
struct Published {
  int stages, micro_batches;
  double forward, inputs, weights, transfer, rate_1f1b, rate_zb_h1;
};
constexpr std::array<Published, 12> kPublished = {{{8, 24, 18.522, 18.086, 9.337, .601, .2431, .1585},
                                                   {8, 32, 18.513, 18.086, 9.331, .626, .1985, .1242},
                                                   {8, 64, 18.546, 18.097, 9.321, .762, .1240, .0674},
                                                   {8, 24, 29.718, 29.444, 19.927, .527, .2347, .1323},
                                                   {8, 32, 29.802, 29.428, 19.530, .577, .1898, .1045},
                                                   {8, 64, 29.935, 29.621, 19.388, .535, .1091, .0554},
                                                   {16, 48, 11.347, 11.248, 8.132, .377, .2552, .1397},
                                                   {16, 64, 11.307, 11.254, 8.101, .379, .2082, .1088},
                                                   {16, 128, 11.325, 11.308, 8.109, .378, .1251, .0576},
                                                   {32, 96, 10.419, 10.207, 7.715, .408, .2646, .1421},
                                                   {32, 128, 10.408, 10.204, 7.703, .408, .2168, .1106},
                                                   {32, 256, 10.402, 10.248, 7.698, .460, .1352, .0594}}};

double bubble(Pipelines& pipelines, Schedule schedule, const Published& row, double transfer) {
  const double taken =
      pipelines.seconds(pipeline(schedule, row.stages, 1, row.micro_batches),
                        uniform_times(row.stages, row.forward, row.inputs, row.weights, transfer));
  return 1 - row.micro_batches * (row.forward + row.inputs + row.weights) / taken;
}

TEST(PlanSchedule, GivesThePublishedBubbleRatesToFourDecimals) {
  Pipelines pipelines;
  for (const Published& row : kPublished) {
    EXPECT_NEAR(bubble(pipelines, Schedule::kOneFOneB, row, row.transfer), row.rate_1f1b, 5.01e-5);
    EXPECT_NEAR(bubble(pipelines, Schedule::kZeroBubbleH1, row, row.transfer), row.rate_zb_h1, 5.01e-5);
    // Without transfers, which many planners leave out, no rate is met.
    EXPECT_GT(std::abs(bubble(pipelines, Schedule::kOneFOneB, row, 0) - row.rate_1f1b), 5e-4);
  }
}

// Every kind of pipeline that has a period, with stages that differ by turns: even, one slow, random.
TEST(PlanSchedule, ContinuesPipelinesAsTheSimulatorDoes) {
  Pipelines pipelines;
  unsigned state = 1;
  const auto random = [&] { return 0.5 + (state = state * 1664525U + 1013904223U) / 4294967296.0; };
  const struct {
    Schedule schedule;
    int stages_per_rank;
  } kinds[] = {{Schedule::kOneFOneB, 1},    {Schedule::kGPipe, 1},        {Schedule::kInterleaved, 2},
               {Schedule::kInterleaved, 3}, {Schedule::kZeroBubbleH1, 1}, {Schedule::kZeroBubbleV, 2}};
  std::size_t compared = 0;
  for (const auto& [schedule, stages_per_rank] : kinds)
    for (const int ranks : {2, 3, 4, 7})
      for (int variant = 0; variant < 8; ++variant) {
        const int stages = ranks * stages_per_rank;
        StageTimes times = uniform_times(stages, 1, 1.25, 0.75, variant % 2 ? 0.125 : 0);
        if (variant / 2 == 1) times.forward.back() *= 1.5, times.backward_weights.back() *= 2;
        if (variant / 2 == 2) times.backward_inputs.front() = 1.25 * (1 + 1e-3);
        if (variant / 2 == 3)
          for (auto* each : {&times.forward, &times.backward_inputs, &times.backward_weights})
            for (double& time : *each) time = random();
        for (const int micro_batches : {1, 5, 40, 81, 200, 437}) {
          const Candidate candidate = pipeline(schedule, ranks, stages_per_rank, micro_batches);
          const int played = schedule == Schedule::kInterleaved ? (micro_batches + ranks - 1) / ranks * ranks
                                                                : micro_batches;
          const double reference =
              simulate(make_pipeline(std::string(name_of(schedule)), ranks, stages_per_rank, played), times)
                  .length;
          EXPECT_NEAR(pipelines.seconds(candidate, times), reference, 1e-9 * reference)
              << name_of(schedule) << " " << ranks << " ranks, " << micro_batches << ", variant " << variant;
          ++compared;
        }
      }
  EXPECT_EQ(compared, 6u * 4 * 8 * 6);
}

TEST(PlanSchedule, ContinuesToMillionsOfForwards) {
  Pipelines pipelines;
  const StageTimes times = uniform_times(4, 1, 1.1, 0.9, 0.05);
  const double reference = simulate(make_pipeline("1f1b", 4, 1, 100'000), times).length;
  EXPECT_NEAR(pipelines.seconds(pipeline(Schedule::kOneFOneB, 4, 1, 100'000), times), reference,
              1e-9 * reference);
  // Four million forwards: what 100,000 micro-batches grow by, as often.
  const double slope = (reference - simulate(make_pipeline("1f1b", 4, 1, 20'000), times).length) / 80'000;
  const double all = reference + 900'000 * slope;
  EXPECT_NEAR(pipelines.seconds(pipeline(Schedule::kOneFOneB, 4, 1, 1'000'000), times), all, 1e-9 * all);
}

TEST(PlanSchedule, KeepsWhatTheSimulatorCountsAlive) {
  Pipelines pipelines;
  for (const auto& [schedule, stages_per_rank] : {std::pair{Schedule::kOneFOneB, 1},
                                                  {Schedule::kGPipe, 1},
                                                  {Schedule::kInterleaved, 2},
                                                  {Schedule::kZeroBubbleH1, 1},
                                                  {Schedule::kZeroBubbleV, 2}})
    for (const int micro_batches : {4, 8, 64}) {
      const Candidate candidate = pipeline(schedule, 4, stages_per_rank, micro_batches);
      const int stages = 4 * stages_per_rank;
      const auto all = [&](double bytes) {
        return std::vector<double>(static_cast<std::size_t>(stages), bytes);
      };
      const PipelineTimeline timeline =
          simulate(make_pipeline(std::string(name_of(schedule)), 4, stages_per_rank, micro_batches),
                   uniform_times(stages), 0.9);
      for (int rank = 0; rank < 4; ++rank)
        EXPECT_DOUBLE_EQ(pipelines.most_kept(candidate, rank, all(10), all(9), all(0), all(0)),
                         10 * timeline.most_kept[static_cast<std::size_t>(rank)])
            << name_of(schedule) << " " << micro_batches << " rank " << rank;
    }
  // The moment decides: a stage whose backward passes much by while little is alive.
  const Candidate two = pipeline(Schedule::kOneFOneB, 2, 1, 8);
  EXPECT_EQ(pipelines.most_kept(two, 0, {10, 1}, {0, 0}, {3, 7}, {0, 0}), 23);
  EXPECT_EQ(pipelines.most_kept(two, 1, {10, 1}, {0, 0}, {3, 7}, {0, 0}), 8);
}

}  // namespace
}  // namespace isograd::planner
