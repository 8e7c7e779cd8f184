// Records of the load of experts, and what reports show of them.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>

#include "base/error_testing.hpp"
#include "base/files.hpp"
#include "train/metrics.hpp"

namespace isograd {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(ExpertLoad, IsTheMostChosenOverTheMean) {
  EXPECT_DOUBLE_EQ((ExpertLoad{0, {4, 4, 4}}).max_over_mean(), 1);
  EXPECT_DOUBLE_EQ((ExpertLoad{0, {0, 12, 0}}).max_over_mean(), 3);
  EXPECT_DOUBLE_EQ((ExpertLoad{0, {1, 2, 3, 2}}).max_over_mean(), 1.5);
  EXPECT_TRUE(std::isnan((ExpertLoad{0, {0, 0}}).max_over_mean()));
}

TEST(ExpertLoad, DeadAreThoseWithoutATokenForSoManySteps) {
  IdleExperts idle;
  idle.step({{2, {1, 0, 3}}, {5, {0, 4, 0}}});
  EXPECT_EQ(idle.dead().steps, 1);
  EXPECT_THAT(idle.dead().by_layer, ElementsAre(ElementsAre(1), ElementsAre(0, 2)));
  idle.step({{2, {0, 0, 4}}, {5, {1, 3, 0}}});
  idle.step({});  // a step without counts
  EXPECT_EQ(idle.dead().steps, 2);
  EXPECT_THAT(idle.dead().by_layer, ElementsAre(ElementsAre(1), ElementsAre(2)));
  // Expert 0 of layer 2 has its last token in the first step.
  for (std::int64_t i = 0; i < kDeadAfter - 2; ++i) {
    EXPECT_THAT(idle.dead().by_layer[0], ElementsAre(1)) << i;
    idle.step({{2, {0, 0, 4}}, {5, {1, 3, 0}}});
  }
  EXPECT_EQ(idle.dead().steps, kDeadAfter);
  EXPECT_THAT(idle.dead().by_layer[0], ElementsAre(1));
  idle.step({{2, {0, 0, 4}}, {5, {1, 3, 0}}});
  EXPECT_EQ(idle.dead().steps, kDeadAfter);
  EXPECT_THAT(idle.dead().by_layer[0], ElementsAre(0, 1));
  idle.step({{2, {0, 1, 3}}, {5, {1, 3, 0}}});
  EXPECT_THAT(idle.dead().by_layer, ElementsAre(ElementsAre(0), ElementsAre(2)));
  idle.step({{2, {0, 1}}});  // another model
  EXPECT_EQ(idle.dead().steps, 1);
  EXPECT_THAT(idle.dead().by_layer, ElementsAre(ElementsAre(0)));
}

TEST(ExpertLoad, DeadExpertsAreNamedByLayer) {
  const std::vector<ExpertLoad> loads = {{1, std::vector<std::int64_t>(8)},
                                         {3, std::vector<std::int64_t>(8)}};
  EXPECT_EQ(name_dead({.steps = 5, .by_layer = {{}, {}}}, loads), "none");
  EXPECT_EQ(name_dead({.steps = 5, .by_layer = {{}, {6}}}, loads), "layer 3: 6");
  EXPECT_EQ(name_dead({.steps = 5, .by_layer = {{0, 3, 7}, {1, 2}}}, loads),
            "layer 1: 0, 3 and 7; layer 3: 1 and 2");
  EXPECT_EQ(name_dead({.steps = 5, .by_layer = {{0, 3, 7}, {1, 2}}}, loads, 2), "layer 1: 0, 3 and 3 more");
}

MetricRow row_of(std::int64_t step, std::vector<ExpertLoad> loads, DeadExperts dead = {}) {
  if (dead.by_layer.empty())
    dead = {.steps = 1, .by_layer = std::vector<std::vector<std::int64_t>>(loads.size())};
  return {.step = step, .loss = 1.0, .expert_loads = std::move(loads), .dead = std::move(dead)};
}

TEST(ExpertLoad, ComesBackFromTheLog) {
  const auto file =
      std::filesystem::path(::testing::TempDir()) / ("loads-" + std::to_string(getpid()) + ".jsonl");
  const std::string line =
      to_json_line(row_of(4, {{1, {4, 0, 10}}, {3, {7, 7, 0}}}, {.steps = 4, .by_layer = {{1}, {}}}));
  EXPECT_THAT(line, HasSubstr(R"("experts":{"layers":[1,3],"max_over_mean":[2.1429,1.5],)"
                              R"("choices":[[4,0,10],[7,7,0]],"dead":[[1],[]],"dead_steps":4})"));
  write_file(file, line);
  const auto rows = read_metrics(file);
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(to_json_line(rows[0]), line);
  EXPECT_EQ(rows[0].expert_loads[1].layer, 3);
  for (const auto& [from, to] :
       std::vector<std::pair<std::string, std::string>>{{"[1,3]", "[3,1]"},
                                                        {"[1,3]", "[1]"},
                                                        {"[1,3]", "[-1,3]"},
                                                        {"[1,3]", "[1,1e30]"},
                                                        {"[4,0,10]", "[4,0,-10]"},
                                                        {"[4,0,10]", "[4,0,18446744073709551615]"},
                                                        {"[4,0,10]", "[4,0,1.5]"},
                                                        {"[4,0,10]", "7"},
                                                        {"[4,0,10]", "[]"},
                                                        {"[[1],[]]", "[[3],[]]"},
                                                        {"[[1],[]]", "[[1,1],[]]"},
                                                        {"[[1],[]]", "[[1]]"},
                                                        {"\"dead_steps\":4", "\"dead_steps\":-4"},
                                                        {"\"dead_steps\":4", "\"dead_steps\":null"}}) {
    std::string changed = line;
    changed.replace(changed.find(from), from.size(), to);
    write_file(file, changed);
    EXPECT_THAT(error_testing::error_of([&] { read_metrics(file); }),
                HasSubstr("loads of experts that do not fit together"))
        << changed;
  }
  for (const char* foreign : {"7", "[]", "{}", "null"}) {
    write_file(file, fmt::format("{{\"step\":1,\"experts\":{}}}\n", foreign));
    EXPECT_THAT(error_testing::error_of([&] { read_metrics(file); }), HasSubstr("metrics of an earlier run"));
  }
  std::filesystem::remove(file);
}

TEST(LoadsInReports, TakesTheRowsOfOneModel) {
  std::vector<MetricRow> rows = {row_of(1, {{0, {1, 1}}}),
                                 row_of(2, {{0, {1, 1, 1}}}),
                                 {.step = 2, .validation_loss = 1.0},
                                 row_of(3, {}),
                                 row_of(4, {{0, {3, 0, 0}}})};
  const auto found = rows_with_loads(rows);
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0]->step, 2);
  EXPECT_EQ(found[1]->step, 4);
  EXPECT_THAT(rows_with_loads({{.step = 1}}), IsEmpty());
  const Chart chart = load_chart(found);
  ASSERT_EQ(chart.series.size(), 1u);
  EXPECT_EQ(chart.series[0].name, "layer 0");
  EXPECT_DOUBLE_EQ(chart.series[0].points[1].y, 3);
}

// Expert 1 of 4 takes half of all choices in the first two steps of four and none later.
TEST(LoadsInReports, TheTableNamesWhoGetsWhat) {
  std::vector<MetricRow> rows;
  for (std::int64_t step = 1; step <= 4; ++step)
    rows.push_back(step <= 2 ? row_of(step, {{7, {10, 40, 15, 15}}}) : row_of(step, {{7, {20, 0, 20, 20}}}));
  EXPECT_THAT(load_table(rows_with_loads(rows)).rows.at(0),
              ElementsAre("7", "2.00", "1.33", "1.14", "expert 0 (0.86)", "expert 1 (1.14)", "none"));
  EXPECT_THAT(load_table(rows_with_loads({rows[2], rows[3]})).rows.at(0),
              ElementsAre("7", "1.33", "1.33", "1.33", "expert 1 (0.00)", "expert 0 (1.33)", "1"));
}

// The chart of many layers has their highest and their median.
TEST(LoadsInReports, OfALargeModelTwoCurves) {
  std::vector<MetricRow> rows;
  for (std::int64_t step = 0; step < 3; ++step) {
    std::vector<ExpertLoad> loads;
    for (std::int64_t layer = 0; layer < 48; ++layer)
      loads.push_back({.layer = layer, .choices = {layer == 20 ? 3 : 1, 1, layer > 30 ? 2 : 1}});
    rows.push_back(row_of(10 * step, std::move(loads)));
  }
  const Chart chart = load_chart(rows_with_loads(rows));
  ASSERT_EQ(chart.series.size(), 2u);
  EXPECT_DOUBLE_EQ(chart.series[0].points.at(2).y, 9.0 / 5);
  EXPECT_DOUBLE_EQ(chart.series[1].points.at(2).y, 1);
}

// A log may contain anything.
TEST(LoadsInReports, OfAnOddLogAreShown) {
  constexpr std::int64_t kFar = std::numeric_limits<std::int64_t>::max();
  for (const auto& steps : std::vector<std::vector<std::int64_t>>{{1}, {3, 3}, {9, 2}, {-kFar, kFar}}) {
    std::vector<MetricRow> rows;
    for (const std::int64_t step : steps) rows.push_back(row_of(step, {{0, {0, 0}}, {1, {5, 0}}}));
    Report report("run");
    report.chart(load_chart(rows_with_loads(rows)));
    report.table(load_table(rows_with_loads(rows)));
    EXPECT_THAT(report.html(), AllOf(HasSubstr("Experts by layer"), HasSubstr("expert 0 (2.00)")));
  }
}

}  // namespace
}  // namespace isograd
