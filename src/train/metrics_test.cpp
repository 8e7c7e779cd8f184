#include "train/metrics.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstring>
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

// Of somebody who may read the log and nothing else.
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

// RFC 3720, appendix B.4.
TEST(EventFile, Crc32cAgreesWithTheStandard) {
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);
  std::string ascending;
  for (int i = 0; i < 32; ++i) ascending += static_cast<char>(i);
  EXPECT_EQ(crc32c(ascending), 0x46dd794eu);
}

// The framing by the letter; what is inside is read by TensorBoard itself in tests/test_tensorboard.py.
TEST_F(MetricsFiles, EventsAreFramedRecords) {
  fs::path path;
  {
    EventFile events(root_ / "events", 1);
    path = events.path();
    events.scalar("loss", 1, 0.5);
  }
  const std::string bytes = read_file(path);
  const auto unmask = [](std::uint32_t masked) { return std::rotr(masked - 0xa282ead8u, 17); };
  std::size_t at = 0;
  int records = 0;
  while (at < bytes.size()) {
    ASSERT_LE(at + 12, bytes.size());
    std::uint64_t length = 0;
    std::uint32_t crc = 0;
    std::memcpy(&length, bytes.data() + at, 8);
    std::memcpy(&crc, bytes.data() + at + 8, 4);
    EXPECT_EQ(unmask(crc), crc32c(std::string_view(bytes).substr(at, 8)));
    ASSERT_LE(at + 16 + length, bytes.size());
    std::memcpy(&crc, bytes.data() + at + 12 + length, 4);
    EXPECT_EQ(unmask(crc), crc32c(std::string_view(bytes).substr(at + 12, length)));
    at += 16 + length;
    ++records;
  }
  EXPECT_EQ(records, 3);  // version, start of the session, one value
}

TEST_F(MetricsFiles, FilesOfOneFolderSortByTheirStart) {
  std::vector<std::string> names;
  for (int i = 0; i < 4; ++i) names.push_back(EventFile(root_ / "events", 1).path().string());
  EXPECT_TRUE(std::is_sorted(names.begin(), names.end()));
  EXPECT_EQ(std::adjacent_find(names.begin(), names.end()), names.end());
}

}  // namespace
}  // namespace isograd
