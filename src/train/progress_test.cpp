#include "train/presenter.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace isograd {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

StepEvent event(std::int64_t step, std::int64_t total) {
  StepEvent event;
  event.step = step;
  event.total = total;
  event.report.loss = 2.34567;
  event.report.norm = 0.8125;
  event.seconds = 0.5;
  event.tokens_per_second = 12345;
  return event;
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

}  // namespace
}  // namespace isograd
