#include "train/metrics.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <unistd.h>

#include <cmath>
#include <limits>

#include "base/error_testing.hpp"
#include "base/files.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class MetricsFiles : public ::testing::Test {
 protected:
  void SetUp() override { fs::create_directories(root_); }
  void TearDown() override { fs::remove_all(root_); }
  fs::path root_ = fs::path(::testing::TempDir()) / ("metrics-" + std::to_string(getpid()));
  MetricsOptions options(std::int64_t first_step = 0) const {
    return {.json_log = root_ / "log/metrics.jsonl",
            .events_directory = root_ / "events",
            .first_step = first_step};
  }
};

StepEvent event(std::int64_t step) {
  StepEvent event;
  event.step = step;
  event.total = 10;
  event.report.loss = 2.0 / static_cast<double>(step);  // not a short decimal: all digits must survive
  event.report.norm = 0.5;
  event.report.clip_coefficient = 1;
  event.report.updated = true;
  event.report.census.tokens = 1000 + step;
  event.report.census.targets = 900 + step;
  event.learning_rate = 1e-3;
  event.seconds = 0.25;
  event.tokens_per_second = 4000;
  return event;
}

TEST_F(MetricsFiles, ALogOfARunUnderWayIsRefusedAndLeftAsItIs) {
  {
    Metrics first(options());
    first.step(event(1));
    const std::string text = read_file(options().json_log);
    EXPECT_THAT(error_testing::error_of([&] { Metrics second(options()); }),
                HasSubstr("the log of a run that is under way"));
    first.step(event(2));
    EXPECT_EQ(read_metrics(options().json_log).size(), 2u);
    EXPECT_EQ(read_file(options().json_log).substr(0, text.size()), text);
  }
  Metrics after(options());  // the run has ended
}

// A lock of a user who may only read the log.
TEST_F(MetricsFiles, LocksOfReadersKeepNoRunFromItsLog) {
  { Metrics(options()).step(event(1)); }
  const int reader = open(options().json_log.c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_EQ(flock(reader, LOCK_EX | LOCK_NB), 0);
  struct flock shared {};
  shared.l_type = F_RDLCK, shared.l_whence = SEEK_SET;
  ASSERT_EQ(fcntl(reader, F_OFD_SETLK, &shared), 0);
  EXPECT_EQ(error_testing::error_of([&] { Metrics again(options()); }), "no error");
  close(reader);
}

TEST_F(MetricsFiles, EveryRowIsReadableAtOnceAndWithAllItsDigits) {
  Metrics metrics(options());
  for (std::int64_t step = 1; step <= 3; ++step) {
    metrics.step(event(step));
    const auto rows = read_metrics(options().json_log);
    ASSERT_EQ(rows.size(), static_cast<std::size_t>(step));
    EXPECT_EQ(rows.back().step, step);
    EXPECT_EQ(rows.back().loss, 2.0 / static_cast<double>(step));
    EXPECT_EQ(rows.back().tokens, 1000 + step);
    EXPECT_EQ(rows.back().targets, 900 + step);
    EXPECT_EQ(rows.back().updated, true);
    EXPECT_EQ(rows.back().validation_loss, std::nullopt);
  }
  metrics.evaluation({.step = 3, .loss = 1.25, .targets = 77});
  const auto rows = read_metrics(options().json_log);
  EXPECT_EQ(rows.back().validation_loss, 1.25);
  EXPECT_EQ(rows.back().validation_targets, 77);
  EXPECT_EQ(rows.back().loss, std::nullopt);
}

TEST_F(MetricsFiles, NotFiniteIsNullAndComesBackAsNaN) {
  Metrics metrics(options());
  StepEvent bad = event(1);
  bad.report.loss = std::numeric_limits<double>::quiet_NaN();
  bad.report.norm = std::numeric_limits<double>::infinity();
  metrics.step(bad);
  EXPECT_THAT(read_file(options().json_log), HasSubstr("\"loss\":null,\"norm\":null"));
  const auto rows = read_metrics(options().json_log);
  EXPECT_TRUE(std::isnan(rows.at(0).loss.value()));
  EXPECT_TRUE(std::isnan(rows.at(0).norm.value()));
}

TEST_F(MetricsFiles, ResumeDropsTheFutureThatWasNotTaken) {
  {
    Metrics metrics(options());
    for (std::int64_t step = 1; step <= 6; ++step) metrics.step(event(step));
  }
  Metrics metrics(options(4));
  EXPECT_EQ(metrics.rows().size(), 4u);
  metrics.step(event(5));
  std::vector<std::int64_t> steps;
  for (const auto& row : read_metrics(options().json_log)) steps.push_back(row.step);
  EXPECT_EQ(steps, (std::vector<std::int64_t>{1, 2, 3, 4, 5}));
  EXPECT_EQ(std::distance(fs::directory_iterator(root_ / "events"), fs::directory_iterator()), 2);
}

TEST_F(MetricsFiles, AFreshRunStartsAFreshLog) {
  { Metrics(options()).step(event(1)); }
  Metrics metrics(options());
  EXPECT_TRUE(metrics.rows().empty());
  EXPECT_TRUE(read_metrics(options().json_log).empty());
}

TEST_F(MetricsFiles, ALineCutOffByAKillIsLeftOut) {
  const fs::path file = root_ / "cut.jsonl";
  write_file(file, to_json_line({.step = 1, .loss = 2.0}) + to_json_line({.step = 2}).substr(0, 5));
  EXPECT_EQ(read_metrics(file).size(), 1u);
}

TEST_F(MetricsFiles, AForeignFileIsNamed) {
  for (const char* line : {"hello\n", "[]\n", "3\n", "{\"loss\": 1}\n", "{\"step\": \"one\"}\n"}) {
    write_file(root_ / "other.jsonl", to_json_line({.step = 1}) + line);
    try {
      read_metrics(root_ / "other.jsonl");
      ADD_FAILURE() << line << " was accepted";
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), HasSubstr("other.jsonl:2")) << line;
    }
  }
}

TEST(Chart, TrainingChartsPickTheirColumns) {
  std::vector<MetricRow> rows(3);
  rows[0] = {.step = 1, .loss = 3, .norm = 2, .learning_rate = 0.1, .tokens_per_second = 10};
  rows[1] = {.step = 2, .loss = 2, .norm = 1, .learning_rate = 0.2, .tokens_per_second = 11};
  rows[2] = {.step = 2, .validation_loss = 2.5};
  const auto charts = training_charts(rows, 3.4);
  ASSERT_EQ(charts.size(), 4u);
  EXPECT_EQ(charts[0].series.at(0).points.size(), 2u);
  EXPECT_EQ(charts[0].series.at(1).points.at(0).y, 2.5);
  EXPECT_EQ(charts[0].marks.at(0).second, 3.4);
  EXPECT_EQ(charts[1].series.at(0).points.at(1).y, 1);
  EXPECT_EQ(charts[2].series.at(0).points.at(1).y, 11);
  EXPECT_EQ(charts[3].series.at(0).points.at(1).y, 0.2);
  EXPECT_EQ(training_charts({rows[0]}, 0)[0].series.size(), 1u);
}

}  // namespace
}  // namespace isograd
