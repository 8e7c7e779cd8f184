// The page and the pictures of a plan: whole documents, whose numbers are the plan's.
#include "plan/pages.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>

#include "isograd/pipeline_parallel.hpp"
#include "plan/inputs.hpp"
#include "plan/memory.hpp"
#include "report/tags_testing.hpp"

namespace isograd::planner {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr double kGibibyte = 1 << 30;

Planned planned(const Candidate& candidate, double seconds, double tokens) {
  Planned one;
  one.candidate = candidate;
  one.memory = {.parameters = 2 * kGibibyte,
                .gradients = 4 * kGibibyte,
                .masters = kGibibyte,
                .states = 2 * kGibibyte,
                .activations = 11 * kGibibyte,
                .logits = 3 * kGibibyte,
                .reserve = kGibibyte};
  one.step = {.products = 0.5 * seconds,
              .attention = 0.25 * seconds,
              .tp = 0.125 * seconds,
              .bubble = 0.125 * seconds};
  one.seconds = {seconds, 0.75 * seconds, 1.25 * seconds, Origin::kDataSheet};
  one.bytes = {24 * kGibibyte, 23 * kGibibyte, 25 * kGibibyte, Origin::kFitted};
  one.tokens_per_second = {tokens / seconds, 0, 0, Origin::kDataSheet};
  one.mfu = 0.421;
  one.head_room = 56 * kGibibyte;
  one.proved = true;
  one.memory_parts = {{"activations",
                       "tensors <that> backward reads",
                       {11 * kGibibyte, 10 * kGibibyte, 12 * kGibibyte, Origin::kAssumed}}};
  one.step_parts = {{"products", "all", {0.5 * seconds, 0.4 * seconds, 0.6 * seconds, Origin::kCalibrated}}};
  return one;
}

// An 8B model on 64 devices; `scale` moves every time of it.
Plan some_plan(double scale = 1) {
  Plan plan;
  plan.model = parse_model("name=small,layers=8,hidden=512,heads=8,vocabulary=1000", "a test");
  plan.cluster = read_cluster("h100", 64);
  plan.work = {.tokens = 1 << 20, .sequence = 1024};
  const Candidate wide{.ranks = 64, .shards = 64, .strategy = Strategy::kZero3, .micro_batches = 16},
      deep{.ranks = 64, .shards = 16, .pp = 4, .schedule = Schedule::kOneFOneB, .micro_batches = 64};
  plan.top = {planned(deep, 3.25 * scale, plan.work.tokens), planned(wide, 4.5 * scale, plan.work.tokens)};
  plan.front = plan.top;
  plan.front[1].candidate.ranks = 32;
  plan.neighbours = {{"tp 16", "its all-reduce leaves the host: +41 %", 4.75 * scale}};
  plan.laws = {{"ring latency",
                "data ranks",
                "gathers are longer than a layer",
                "replicas",
                {440, 300, 500, Origin::kAssumed},
                16,
                false},
               {"tokens of a rank",
                "tokens",
                "too few to hide a reduction",
                "a larger batch",
                {1854, 1600, 2000, Origin::kFitted},
                1024,
                true}};
  plan.recipe = {{"samples", "tokens / sequence", "1024", "exact"}};
  plan.ways_out = {{"a larger batch", 2 << 20, plan.top[1]}};
  plan.scaling = {{8, planned(wide, 16 * scale, plan.work.tokens), 1, "none"},
                  {64, plan.top[0], 0.9, "tokens of a rank"},
                  {1024, planned(deep, 1 * scale, plan.work.tokens), 0.5, "ring latency"}};
  plan.warnings = {"the network is assumed"};
  plan.candidates = 1234, plan.fitting = 321;
  return plan;
}

std::vector<Span> some_spans() {
  return {{"stage 0 compute", "F0", 0, 1},   {"stage 0 compute", "B0", 2, 4},
          {"stage 1 compute", "F0", 1, 1.5}, {"stage 1 compute", "B0", 1.5, 2},
          {"dp", "reduce", 3, 4.5},          {"optimizer", "optimizer", 4.5, 5}};
}

std::vector<std::smatch> all(const std::string& text, const std::string& pattern) {
  const std::regex regex(pattern);
  return {std::sregex_iterator(text.begin(), text.end(), regex), std::sregex_iterator()};
}

TEST(PlanPages, AreWholeAndNeedNothingFromOutside) {
  Plan plan = some_plan();
  plan.model.name = "<script>alert(1)</script>";
  for (const std::string& html :
       {page(plan, some_spans()).html(), page(Plan{}, {}).html(), page(std::vector<PublishedRow>()).html(),
        svg_file(memory_bars(plan)), svg_file(step_bars(plan)), svg_file(timeline_svg(some_spans(), 5))}) {
    EXPECT_THAT(open_tags(html), IsEmpty());
    for (const char* part : {"<script", "src=", "href=", "url(", "@import", "<link", "nan", "inf\""})
      EXPECT_THAT(html, Not(HasSubstr(part)));
  }
}

TEST(PlanPages, HaveThePlansNumbers) {
  const std::string html = page(some_plan(), some_spans()).html();
  for (const char* text : {"3.25 s a step",
                           "2.44 s to 4.06 s",
                           "323k",
                           "42.1 %",
                           "24 GiB",
                           "56 GiB",
                           "321 of 1.23k",
                           "the network is assumed",
                           "10 GiB to 12 GiB",
                           "tensors &lt;that&gt; backward reads",
                           "1.3 s to 1.95 s",
                           "calibrated",
                           "4.75 s",
                           "leaves the host: +41 %",
                           "440 data ranks",
                           "1.85k tokens",
                           "gathers are longer than a layer",
                           "2.10M",
                           "90.0 %",
                           "ring latency",
                           "proved by tests",
                           "1 GiB"})
    EXPECT_THAT(html, HasSubstr(text));
  // Another plan's page has other times.
  const std::string other = page(some_plan(2), some_spans()).html();
  EXPECT_THAT(other, HasSubstr("6.5 s a step"));
  EXPECT_THAT(other, Not(HasSubstr("3.25 s a step")));
}

TEST(PlanPages, SayWhatIsMissingWhereNothingFits) {
  Plan plan = some_plan();
  plan.nearest = plan.top[0], plan.missing = "lacks 3.1 GiB at tp 8; fits with checkpointing";
  plan.top.clear(), plan.front.clear(), plan.scaling.clear();
  const std::string html = page(plan, {}).html();
  EXPECT_THAT(html, HasSubstr("lacks 3.1 GiB at tp 8; fits with checkpointing"));
  EXPECT_THAT(html, HasSubstr("Memory of a rank"));
  EXPECT_THAT(open_tags(html), IsEmpty());
}

TEST(PlanPages, MemoryBarsAreTheRanksOfThePipelineAndTheOtherLayouts) {
  const Plan plan = some_plan();
  const std::string picture = memory_bars(plan);
  const Calibration nothing;
  const Problem problem{plan.model, plan.cluster, nothing, plan.work};
  Pipelines pipelines;
  MemoryModel memory(problem, pipelines);
  // Ranks 0 (the fullest of this plan), 1 and 3 of four, then the second layout.
  const auto found = all(picture, "activations: ([0-9.e+-]+) GiB");
  ASSERT_EQ(found.size(), 4u);
  const double expected[] = {11, memory.of_rank(plan.top[0].candidate, 1).activations / kGibibyte,
                             memory.of_rank(plan.top[0].candidate, 3).activations / kGibibyte, 11};
  for (std::size_t i = 0; i < 4; ++i)
    EXPECT_NEAR(std::stod(found[i][1]), expected[i], 1e-3 * expected[i]) << i;
  EXPECT_NE(expected[1], expected[2]);
  EXPECT_THAT(picture, HasSubstr(">the device<"));
  EXPECT_THAT(picture, HasSubstr("masters, states: 3 GiB"));
  // The fullest rank of all that the model finds is one of its ranks.
  double most = 0;
  for (int rank = 0; rank < 4; ++rank)
    most = std::max(most, memory.of_rank(plan.top[0].candidate, rank).total());
  EXPECT_EQ(most, memory.of(plan.top[0].candidate).total());
}

TEST(PlanPages, StepBarsAreTheWholeStep) {
  const std::string picture = step_bars(some_plan());
  double sum = 0;
  for (const auto& found : all(picture, ": ([0-9.]+) % of the step")) sum += std::stod(found[1]);
  EXPECT_NEAR(sum, 300, 0.1);
  EXPECT_THAT(picture, HasSubstr("attention: 25 % of the step"));
  EXPECT_THAT(picture, HasSubstr("1024 devices"));
}

TEST(PlanPages, ATimelineHasEverySpanAtItsTime) {
  const auto spans = some_spans();
  const std::string picture = timeline_svg(spans, 5);
  const auto found = all(
      picture,
      "<rect class=\"part (c[0-9])\" x=\"([0-9.]+)\" y=\"([0-9.]+)\" width=\"([0-9.]+)\"[^>]*><title>([^<]*)");
  ASSERT_EQ(found.size(), spans.size());
  const double left = std::stod(found[0][2]), second = std::stod(found[0][4]);
  const std::size_t in_order[] = {0, 1, 2, 3, 4, 5};
  for (const std::size_t i : in_order) {
    EXPECT_NEAR(std::stod(found[i][2]), left + second * spans[i].begin, 0.02) << i;
    EXPECT_NEAR(std::stod(found[i][4]), second * (spans[i].end - spans[i].begin), 0.02) << i;
  }
  EXPECT_EQ(found[0][3], found[1][3]) << "one lane";
  EXPECT_NE(found[1][3], found[2][3]);
  EXPECT_EQ(found[4][5], "reduce: 3 s to 4.5 s");
  EXPECT_THAT(timeline_svg({}, 0), Not(HasSubstr("nan")));
}

TEST(PlanPages, AStepOfManyMicroBatchesIsDrawnWithFewRectangles) {
  std::vector<Span> spans;
  for (int i = 0; i < 20000; ++i)
    spans.push_back({"stage 0 compute", "F" + std::to_string(i), i * 1e-3, i * 1e-3 + 4e-4}),
        spans.push_back({"stage 0 compute", "B" + std::to_string(i), i * 1e-3 + 4e-4, (i + 1) * 1e-3});
  const std::string picture = timeline_svg(spans, 20);
  const auto found =
      all(picture, "<rect class=\"part c[0-9]\" x=\"([0-9.]+)\" y=\"[0-9.]+\" width=\"([0-9.]+)\"");
  EXPECT_LT(found.size(), kLanesWidth / 4);
  double covered = 0;
  for (const auto& one : found) covered += std::stod(one[2]);
  EXPECT_NEAR(covered, std::stod(found.back()[1]) + std::stod(found.back()[2]) - std::stod(found.front()[1]),
              1.5)
      << "the rank is never idle";
  EXPECT_THAT(picture, HasSubstr("F0 to "));
}

TEST(PlanPages, ATraceHasTheSameSpansInMicroseconds) {
  const auto spans = some_spans();
  const auto events = nlohmann::json::parse(chrome_trace(spans));
  std::size_t next = 0;
  std::map<int, std::string> lanes;
  for (const auto& event : events) {
    if (event["ph"] == "M") {
      lanes[event["tid"]] = event["args"]["name"];
      continue;
    }
    ASSERT_LT(next, spans.size());
    EXPECT_EQ(event["name"], spans[next].name);
    EXPECT_EQ(lanes[event["tid"]], spans[next].lane);
    EXPECT_DOUBLE_EQ(event["ts"], spans[next].begin * 1e6);
    EXPECT_DOUBLE_EQ(event["dur"], (spans[next].end - spans[next].begin) * 1e6);
    ++next;
  }
  EXPECT_EQ(next, spans.size());
}

TEST(PlanPages, ChartsHaveThePlansPoints) {
  const Plan plan = some_plan();
  const Chart scaling = scaling_chart(plan);
  ASSERT_EQ(scaling.series[0].points.size(), 3u);
  EXPECT_EQ(scaling.series[0].points[2].x, 1024);
  EXPECT_EQ(scaling.series[0].points[2].y, plan.work.tokens / 1024);
  ASSERT_EQ(scaling.x_marks.size(), 1u) << "a law of tokens is at no number of devices";
  EXPECT_EQ(scaling.x_marks[0].second, 440 * 4) << "the 64 devices of 16 data ranks are four each";
  const Chart front = front_chart(plan);
  ASSERT_EQ(front.series.size(), 2u);
  EXPECT_EQ(front.series[0].name, "64 devices");
  EXPECT_EQ(front.series[0].points[0].x, 56);
  EXPECT_EQ(front.series[0].points[0].y, plan.work.tokens / 3.25);
}

PublishedRow published(const char* program, double twin_ratio, double factor) {
  PublishedRow row{.id = program, .tier = "A", .hardware = "H100-SXM-80GB", .framework = program};
  row.model = parse_model("layers=16,hidden=2048,heads=32,feed_forward=8192,vocabulary=131072", "a test");
  row.candidate = {.ranks = 8, .replicas = 8, .micro_batch = 2, .micro_batches = 16};
  row.work = {.tokens = 256 * 4096, .sequence = 4096};
  row.twin_ratio = twin_ratio;
  row.seconds = 1;
  row.seconds = factor * timed_rows({row}).at(0).predicted;
  return row;
}

TEST(PlanPages, PublishedStepsStandAgainstTheModels) {
  std::vector<PublishedRow> rows = {published("nanotron", 1.05, 1.1),
                                    published("nanotron", 3, 4),
                                    published("a", 0, 1),
                                    published("b", 0, 1 / 1.1),
                                    published("c", 0, 2),
                                    published("d", 0, 2),
                                    published("e", 0, 2)};
  for (int copies = 0; copies < 2; ++copies) rows.push_back(rows[0]), rows.push_back(rows[1]);
  rows.push_back(rows[0]), rows.back().tier = "B";
  rows.push_back(rows[0]), rows.back().failed = true, rows.back().tier = "A-fail";
  const Chart chart = published_chart(rows);
  ASSERT_EQ(chart.series.size(), 6u);
  EXPECT_EQ(chart.series.back().name, "others");
  std::size_t points = 0;
  for (const Series& series : chart.series) {
    points += series.points.size();
    for (const Point& point : series.points) {
      EXPECT_GT(point.y, 0);
      if (series.name == "nanotron, confirmed") EXPECT_NEAR(point.x / point.y, 1.1, 1e-9);
      if (series.name == "nanotron, others") EXPECT_NEAR(point.x / point.y, 4, 1e-9);
    }
  }
  EXPECT_EQ(points, 11u);
  // The lines: equal, and 10 % off in both directions, within the axes.
  ASSERT_EQ(chart.guides.size(), 3u);
  const double factors[] = {1, 1.1, 1 / 1.1};
  for (std::size_t i = 0; i < 3; ++i)
    for (const Point& point : chart.guides[i]) EXPECT_NEAR(point.y / point.x, factors[i], 1e-9);
  const std::string html = page(rows).html();
  EXPECT_THAT(html, HasSubstr("nanotron, confirmed"));
  EXPECT_THAT(open_tags(html), IsEmpty());
}

}  // namespace
}  // namespace isograd::planner
