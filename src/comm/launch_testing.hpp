// Fixture for tests of process ranks: a folder for their files, and rank_program.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <thread>

#include "isograd/world.hpp"

namespace isograd {

using ::testing::AllOf;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

inline const std::string kProgram = ISOGRAD_RANK_PROGRAM;

inline std::string read(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

inline std::set<std::string> names_in(const fs::path& folder) {
  std::set<std::string> names;
  if (!fs::exists(folder)) return names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename());
  return names;
}

// A folder for the ranks' files, and a check for leftovers.
class Launch : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "isograd-launch-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    shared_before_ = names_in("/dev/shm");
  }
  void TearDown() override {
    fs::remove_all(folder_);
    for (const std::string& name : names_in("/dev/shm")) {
      EXPECT_TRUE(shared_before_.count(name) || name.find("isograd") == std::string::npos)
          << "left: " << name;
    }
  }
  // Runs rank_program as ranks over `backend`.
  int launch(int ranks, std::vector<std::string> command, int grace_ms = 3000,
             const std::string& backend = "shm") {
    command.insert(command.begin(), {kProgram, backend});
    return launch_ranks(command,
                        {.ranks = ranks, .grace = std::chrono::milliseconds(grace_ms), .backend = backend});
  }
  std::string left(const std::string& name) const { return read(folder_ / name); }
  bool wait_for(const std::string& name) const {
    for (int i = 0; i < 1000 && !fs::exists(folder_ / name); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    return fs::exists(folder_ / name);
  }

  fs::path folder_;
  std::set<std::string> shared_before_;
};

}  // namespace isograd
