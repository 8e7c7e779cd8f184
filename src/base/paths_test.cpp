#include "base/paths.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <limits>

#include "base/files.hpp"
#include "base/number_ranges.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

namespace fs = std::filesystem;

class Paths : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "isograd-paths-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    directory_ = name;
    fs::create_directories(directory_ / "models/llama-small");
    std::ofstream(directory_ / "run.toml");
    std::ofstream(directory_ / "models/llama-small/config.json");
  }
  void TearDown() override { fs::remove_all(directory_); }
  std::string nearest(const fs::path& path) const {
    const auto near = nearest_path(directory_ / path);
    return near ? near->lexically_relative(directory_).string() : "none";
  }
  fs::path directory_;
};

TEST_F(Paths, TheNearestThatIsThereIsNamed) {
  EXPECT_EQ(nearest("rum.toml"), "run.toml");
  EXPECT_EQ(nearest("run.tmol"), "run.toml");
  EXPECT_EQ(nearest("model/llama-small"), "models/llama-small");
  EXPECT_EQ(nearest("models/lama-small/config.json"), "models/llama-small/config.json");
  EXPECT_EQ(nearest("models/lama-small/weights"), "models/llama-small") << "the rest is not there";
  EXPECT_EQ(nearest("something else"), "none");
  EXPECT_EQ(nearest("run.toml"), "none") << "it is there";
  EXPECT_EQ(nearest(std::string(5000, 'x')), "none");
  EXPECT_EQ(nearest("run.toml/below"), "none") << "a file has no entries";
}

TEST_F(Paths, AFileThatIsNotThereIsAnsweredByWhatToDo) {
  const auto said = [&](const fs::path& path) {
    try {
      read_file(path);
    } catch (const ConfigError& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  EXPECT_EQ(said(directory_ / "rum.toml"), "ConfigError: open " + (directory_ / "rum.toml").string() +
                                               ": found no such file. Did you mean " +
                                               (directory_ / "run.toml").string() +
                                               "? Expected a file that can be read. Correct the path.");
  EXPECT_NE(said(directory_ / "absent/run.toml").find("found no folder " + (directory_ / "absent").string()),
            std::string::npos);
  EXPECT_NE(said("no-such-file-here").find("relative ones start at " + fs::current_path().string()),
            std::string::npos);
}

TEST_F(Paths, FoldersAreMadeOrRefused) {
  make_folders(directory_ / "a/b/c/");
  EXPECT_TRUE(fs::is_directory(directory_ / "a/b/c"));
  make_folders(directory_ / "a/b");
  EXPECT_THROW(make_folders(directory_ / "run.toml/below"), ConfigError);
  EXPECT_THROW(make_folders(directory_ / "run.toml"), ConfigError);
}

TEST_F(Paths, ATemporaryFolderIsAloneAndGoes) {
  fs::path made;
  {
    const TemporaryFolder one, other;
    made = one.path();
    EXPECT_NE(made, other.path());
    EXPECT_EQ(fs::status(made).permissions(), fs::perms::owner_all);
    std::ofstream(made / "file") << "x";
  }
  EXPECT_FALSE(fs::exists(made));
}

TEST(WholeNumber, IsDigitsAlone) {
  EXPECT_EQ(whole_number("0"), 0);
  EXPECT_EQ(whole_number("007"), 7);
  EXPECT_EQ(whole_number("9223372036854775807"), std::numeric_limits<std::int64_t>::max());
  for (const char* none : {"", "-0", "-1", "+1", " 1", "1 ", "1.0", "0x1", "9223372036854775808"})
    EXPECT_EQ(whole_number(none), std::nullopt) << none;
}

}  // namespace
}  // namespace isograd
