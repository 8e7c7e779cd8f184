#include "train/presenter.hpp"

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
#include "train/metrics.hpp"

namespace isograd {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;

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

StepEvent event(std::int64_t step, std::int64_t total = 10) {
  StepEvent event;
  event.step = step;
  event.total = total;
  event.report.loss = 2.34567 + 1e-9 / static_cast<double>(step);  // all digits must survive
  event.report.norm = 0.8125;
  event.report.clip_coefficient = 1;
  event.report.updated = true;
  event.report.step_counts.tokens = 1000 + step;
  event.report.step_counts.targets = 900 + step;
  event.learning_rate = 1e-3;
  event.seconds = 0.5;
  event.tokens_per_second = 12345;
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
    EXPECT_EQ(rows.back().loss, event(step).report.loss);
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

// Captures what is written to a file that is treated as a terminal or not.
struct Capture {
  std::FILE* file = std::tmpfile();
  ~Capture() { std::fclose(file); }
  std::string text() {
    std::rewind(file);
    std::string all;
    for (int c = std::fgetc(file); c != EOF; c = std::fgetc(file)) all += static_cast<char>(c);
    return all;
  }
};

std::size_t columns_of(const std::string& text) {
  return static_cast<std::size_t>(std::count_if(
      text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

TEST(Progress, LineSaysLossNormSpeedAndTimeLeft) {
  EXPECT_EQ(progress_line(event(40, 200), std::nullopt, 65, 160, false),
            "step 40/200  loss 2.3457  norm 0.812  12.3k tokens/s  1m 05s left");
  EXPECT_THAT(progress_line(event(40, 200), {}, 65, 160, false, "patches"), HasSubstr("  12.3k patches/s  "));
  EXPECT_THAT(progress_line(event(40, 200), 2.5, 65, 160, false), HasSubstr("validation 2.5000"));
  StepEvent counted = event(40, 200);
  counted.mfu = 0.314;
  EXPECT_EQ(progress_line(counted, std::nullopt, 65, 160, false, "tokens", true),
            "step 40/200  loss 2.3457  norm 0.812  12.3k tokens/s  MFU 31 %  1m 05s left  perplexity 10.44");
}

TEST(Progress, LineFitsTheTerminal) {
  for (int columns = 12; columns < 140; ++columns)
    EXPECT_LE(columns_of(progress_line(event(40, 200), 2.5, 65, columns, true)),
              static_cast<std::size_t>(columns));
  EXPECT_THAT(progress_line(event(100, 200), std::nullopt, 65, 120, true),
              HasSubstr("━━━━━━━━━━━━━━━───────────────  step"));  // 30 columns, half of them done
}

TEST(Progress, NotFiniteIsSaidFirst) {
  StepEvent bad = event(3, 10);
  bad.report.finite = false;
  bad.report.loss = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(progress_line(bad, std::nullopt, 1, 160, false),
              ::testing::StartsWith("step 3/10  not finite: nothing updated  loss nan"));
}

TEST(Progress, TerminalLineRenewsItself) {
  Capture capture;
  {
    Progress progress("tokens", false,
                      {.out = capture.file, .terminal = true, .columns = 100, .redraw_seconds = 0});
    progress.step(event(1, 3));
    progress.line("saved");
    progress.step(event(2, 3));
    progress.step(event(3, 3));
  }
  const std::string text = capture.text();
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 2) << text;  // "saved" and the end
  EXPECT_THAT(text, HasSubstr("\r\033[Ksaved\n"));
  EXPECT_EQ(text.back(), '\n');
  // The last thing seen is the last step.
  EXPECT_THAT(text.substr(text.rfind('\r')), HasSubstr("step 3/3"));
}

TEST(Progress, PlainOutputHasNoControlsAndFewLines) {
  Capture capture;
  {
    Progress progress("tokens", false, {.out = capture.file, .terminal = false, .plain_seconds = 3600});
    for (std::int64_t step = 1; step <= 1000; ++step) progress.step(event(step, 1000));
    progress.evaluation({.step = 1000, .loss = 1.5, .targets = 77});
  }
  const std::string text = capture.text();
  EXPECT_THAT(text, Not(HasSubstr("\r")));
  EXPECT_THAT(text, Not(HasSubstr("\033")));
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 3) << text;  // the first, the last, the evaluation
  EXPECT_THAT(text, HasSubstr("step 1000  validation loss 1.5000 over 77 targets"));
}

TEST(Progress, TimeLeftFollowsTheSteps) {
  Capture capture;
  {
    Progress progress("tokens", false, {.out = capture.file, .terminal = false, .plain_seconds = 0});
    StepEvent first = event(1, 101);
    first.seconds = 60;  // the first step warms caches up and must not spoil the estimate for long
    progress.step(first);
    for (std::int64_t step = 2; step <= 51; ++step) progress.step(event(step, 101));
  }
  EXPECT_THAT(capture.text(), HasSubstr("step 51/101  loss 2.3457  norm 0.812  12.3k tokens/s  25s left"));
}

TEST(Progress, HumanNumbers) {
  EXPECT_EQ(human_count(0), "0");
  EXPECT_EQ(human_count(999.4), "999");
  EXPECT_EQ(human_count(999.6), "1.00k");
  EXPECT_EQ(human_count(12345), "12.3k");
  EXPECT_EQ(human_count(1.2e9), "1.20G");
  EXPECT_EQ(human_count(-4.56e6), "-4.56M");
  EXPECT_EQ(human_count(std::nan("")), "–");
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
