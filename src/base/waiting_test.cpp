#include "base/waiting.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <ctime>
#include <functional>
#include <thread>

namespace isograd {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

struct Output {
  std::FILE* file = std::tmpfile();
  ~Output() { std::fclose(file); }
  std::string text() const {
    std::string all(4096, '\0');
    const auto size = pread(fileno(file), all.data(), all.size(), 0);
    all.resize(static_cast<std::size_t>(std::max<ssize_t>(size, 0)));
    return all;
  }
  // Waits until it is there, however long the machine takes.
  std::string until(const std::function<bool(const std::string&)>& there) const {
    for (int i = 0; i < 3000 && !there(text()); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    return text();
  }
};

std::size_t count(const std::string& text, const std::string& what) {
  std::size_t number = 0;
  for (auto at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++number;
  return number;
}

TEST(Waiting, ALineAtOnceThenOneAPause) {
  const Output output;
  {
    Waiting waiting("layout", 3, 0, {.out = output.file, .terminal = false, .plain_seconds = 0.2});
    waiting.begin("bucketed");
    EXPECT_THAT(output.text(), StartsWith("layout 1 of 3: bucketed, 0.0s\n"));
    waiting.begin("zero\x1b[2J");  // too soon for a line of its own
    EXPECT_EQ(count(output.text(), "\n"), 1u);
    const std::string later = output.until([](const std::string& text) { return count(text, "\n") >= 3; });
    EXPECT_EQ(count(later, "layout 2 of 3: zero\\u{1b}[2J, "), count(later, "\n") - 1) << later;
    EXPECT_THAT(later, HasSubstr(" left\n"));
    waiting.end();
    const std::size_t lines = count(output.text(), "\n");
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    EXPECT_EQ(count(output.text(), "\n"), lines);  // nothing is under way
  }
  const std::string all = output.text();
  EXPECT_EQ(count(all, "\r"), 0u);
}

TEST(Waiting, NothingInALogThatIsForTerminalsAndNoProcessorTimeForIt) {
  const Output output;
  Waiting waiting("token", 9, 0,
                  {.out = output.file, .terminal = false, .plain_seconds = 0.1, .in_a_log = false});
  waiting.begin("text");
  const std::clock_t before = std::clock();
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  EXPECT_LT(double(std::clock() - before) / CLOCKS_PER_SEC, 0.2);
  waiting.begin("text");
  waiting.end();
  EXPECT_EQ(output.text(), "");
}

TEST(Waiting, OnATerminalOneLineThatRenewsItselfAndGoesAway) {
  const Output output;
  {
    Waiting waiting("case", 2, 60,
                    {.out = output.file, .terminal = true, .columns = 60, .redraw_seconds = 0.05});
    waiting.begin("tiny");
    output.until([](const std::string& text) { return count(text, "\r\033[Kcase 1 of 2: tiny, ") >= 3; });
    waiting.begin(2, std::string(200, 'x'));
  }
  const std::string all = output.text();
  EXPECT_THAT(all, HasSubstr("about 2m 00s left"));
  EXPECT_EQ(count(all, "\n"), 0u);
  EXPECT_TRUE(all.ends_with("…\r\033[K")) << all;
  EXPECT_EQ(count(all, std::string(60, 'x')), 0u);
}

TEST(Waiting, TheTimeLeftIsThatOfTheMeanOfWhatIsDone) {
  EXPECT_FALSE(seconds_left(1, 7, 12, 12, 0));             // nothing is known
  EXPECT_EQ(seconds_left(1, 3, 10, 10, 60), 50 + 2 * 60);  // expected
  EXPECT_EQ(seconds_left(3, 7, 25, 5, 60), 5 + 4 * 10);    // 20 s for two
  EXPECT_EQ(seconds_left(3, 7, 45, 25, 60), 4 * 10);       // this one takes longer than the mean
  EXPECT_EQ(seconds_left(7, 7, 61, 1, 0), 9);
  EXPECT_EQ(human_seconds(0.44), "0.4s");
  EXPECT_EQ(human_seconds(59.4), "59s");
  EXPECT_EQ(human_seconds(59.6), "1m 00s");
  EXPECT_EQ(human_seconds(7620), "2h 07m");
  EXPECT_EQ(human_seconds(100000), "1d 03h");
  EXPECT_EQ(human_seconds(1e300), "ages");
  EXPECT_EQ(human_seconds(-1), "–");
}

TEST(Waiting, WhatComesBeforeTheFirstPartAndHowManyThereWillBe) {
  const Output output;
  {
    Waiting layouts("layout", 7, 0, {.out = output.file, .terminal = false});
    layouts.begin(0, "a plain step");
    Waiting trials("trial", 0, 0, {.out = output.file, .terminal = false});
    trials.begin("2 ranks");
  }
  EXPECT_EQ(output.text(), "7 layouts: a plain step, 0.0s\ntrial 1: 2 ranks, 0.0s\n");
}

}  // namespace
}  // namespace isograd
