#include "report/event_file.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/files.hpp"

namespace isograd {
namespace {

namespace fs = std::filesystem;

class EventFiles : public ::testing::Test {
 protected:
  void TearDown() override { fs::remove_all(root_); }
  fs::path root_ = fs::path(::testing::TempDir()) / ("event-files-" + std::to_string(getpid()));
};

// RFC 3720, appendix B.4.
TEST(Crc32c, AgreesWithTheStandard) {
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);
  std::string ascending;
  for (int i = 0; i < 32; ++i) ascending += static_cast<char>(i);
  EXPECT_EQ(crc32c(ascending), 0x46dd794eu);
}

// The framing by the letter; what is inside is read by TensorBoard itself in tests/test_tensorboard.py.
TEST_F(EventFiles, EventsAreFramedRecords) {
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

TEST_F(EventFiles, FilesOfOneFolderSortByTheirStart) {
  std::vector<std::string> names;
  for (int i = 0; i < 4; ++i) names.push_back(EventFile(root_ / "events", 1).path().string());
  EXPECT_TRUE(std::is_sorted(names.begin(), names.end()));
  EXPECT_EQ(std::adjacent_find(names.begin(), names.end()), names.end());
}

}  // namespace
}  // namespace isograd
