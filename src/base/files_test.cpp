#include "base/files.hpp"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <functional>

#include "base/error_testing.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

namespace fs = std::filesystem;

class Files : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "isograd-files-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    directory_ = name;
  }
  void TearDown() override { fs::remove_all(directory_); }
  std::size_t entries() const {
    return static_cast<std::size_t>(
        std::distance(fs::directory_iterator(directory_), fs::directory_iterator()));
  }
  static std::string message(const std::function<void()>& action) { return error_testing::error_of(action); }

  fs::path directory_;
};

TEST_F(Files, CommitPublishesTheWholeFile) {
  const fs::path path = directory_ / "a";
  write_file(path, "old");
  AtomicFile file(path);
  file.write("hello");
  file.write_at(10, "world", 5);
  file.write_at(0, "J", 1);
  EXPECT_EQ(file.position(), 15u);
  EXPECT_EQ(read_file(path), "old");
  file.commit();
  EXPECT_EQ(read_file(path), std::string("Jello\0\0\0\0\0world", 15));
  EXPECT_EQ(entries(), 1u);
}

TEST_F(Files, AnInputIsNoPlaceForAnOutput) {
  const fs::path config = directory_ / "run.toml", dump = directory_ / "dump", link = directory_ / "link";
  fs::create_directory(dump);
  for (const fs::path& file : {config, dump / "step.json", dump / "page.html"}) write_file(file, "x");
  fs::create_symlink(config, link);
  const auto said = [&](const fs::path& output) {
    return message([&] { check_no_input("--report", output, {"", config, dump}); });
  };
  for (const fs::path& output : {config, link, dump / ".." / "run.toml", dump / "step.json"})
    EXPECT_NE(said(output).find("--report: found"), std::string::npos) << output << said(output);
  for (const fs::path& output : {dump / "page.html", dump / "new.json", directory_ / "page.html", fs::path()})
    EXPECT_EQ(said(output), "no error") << output;
}

TEST_F(Files, AFileThatIsTooLargeIsNotRead) {
  write_file(directory_ / "a", "12345");
  EXPECT_EQ(read_file(directory_ / "a", 5), "12345");
  EXPECT_NE(message([&] { read_file(directory_ / "a", 4); }).find("a file of 5 bytes"), std::string::npos);
  fs::resize_file(directory_ / "a", std::uintmax_t{1} << 40);  // takes no space
  EXPECT_NE(message([&] { read_file(directory_ / "a"); }).find("bytes"), std::string::npos);
}

TEST_F(Files, WithoutCommitNothingIsLeft) {
  {
    AtomicFile file(directory_ / "a");
    file.write("hello");
    EXPECT_EQ(entries(), 1u);
  }
  EXPECT_EQ(entries(), 0u);
}

TEST_F(Files, TwoWritersOfOnePathDoNotMix) {
  AtomicFile first(directory_ / "a"), second(directory_ / "a");
  first.write("first");
  second.write("second");
  first.commit();
  second.commit();
  EXPECT_EQ(read_file(directory_ / "a"), "second");
  EXPECT_EQ(entries(), 1u);
}

// A limit on file sizes simulates a full disk: write() fails with EFBIG instead of ENOSPC.
TEST_F(Files, AFullDiskNamesPathAndBytes) {
  rlimit old{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{.rlim_cur = 1 << 16, .rlim_max = old.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  write_file(directory_ / "a", "old");
  const std::string text = message([&] { write_file(directory_ / "a", std::string(100000, 'x')); });
  setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(text.find((directory_ / "a").string()), std::string::npos) << text;
  EXPECT_NE(text.find("bytes free"), std::string::npos) << text;
  EXPECT_NE(text.find("34464 more to write"), std::string::npos) << text;  // 100000 - 65536
  EXPECT_EQ(read_file(directory_ / "a"), "old");
  EXPECT_EQ(entries(), 1u);
}

// A rename would remove a device or a pipe.
TEST_F(Files, WhatIsNoRegularFileIsNotReplaced) {
  const fs::path pipe = directory_ / "pipe", link = directory_ / "link", behind = directory_ / "behind";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_NE(message([&] { write_file(pipe, "x"); }).find("not a regular file"), std::string::npos);
  EXPECT_TRUE(fs::is_fifo(pipe));
  write_file(behind, "before");
  fs::create_symlink(behind, link);
  write_file(link, "after");
  EXPECT_TRUE(fs::is_symlink(link));
  EXPECT_EQ(read_file(behind), "after");
}

TEST_F(Files, WhatCannotBeOpenedIsNamed) {
  EXPECT_NE(message([&] { AtomicFile(directory_ / "no" / "a"); }).find("no/a"), std::string::npos);
  EXPECT_NE(message([&] { MappedFile(directory_ / "absent"); }).find("absent"), std::string::npos);
  EXPECT_NE(message([&] { MappedFile file(directory_); }).find("found a folder"), std::string::npos);
  const fs::path pipe = directory_ / "pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_NE(message([&] { MappedFile file(pipe); }).find("regular file"), std::string::npos);
}

TEST_F(Files, MapsWhatIsThere) {
  write_file(directory_ / "empty", "");
  const MappedFile empty(directory_ / "empty");
  EXPECT_EQ(empty.size(), 0u);
  EXPECT_EQ(read_file(directory_ / "empty"), "");
  write_file(directory_ / "a", std::string_view("a\0b", 3));
  const MappedFile file(directory_ / "a");
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(file.data()), file.size()), std::string("a\0b", 3));
}

TEST_F(Files, ChecksumIsXxh3) {
  EXPECT_EQ(checksum("", 0), "2d06800538d394c2");  // XXH3_64bits of nothing, as xxhsum -H3 prints it
  write_file(directory_ / "a", "abc");
  EXPECT_EQ(checksum_file(directory_ / "a"), checksum("abc", 3));
  EXPECT_NE(checksum("abc", 3), checksum("abd", 3));
  EXPECT_EQ(checksum("abc", 3).size(), 16u);
}

}  // namespace
}  // namespace isograd
