// A checkpoint's folder is whole or absent whatever happens while it is written.
#include "train/checkpoint_files.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <set>

#include "base/error_testing.hpp"
#include "base/files.hpp"
#include "base/paths.hpp"
#include "isograd/checkpoint.hpp"
#include "isograd/error.hpp"

namespace {
std::set<std::string> synced;  // what fsync() was called on
}

// Takes the place of libc's in this program, so that a test can ask what would survive a loss of power.
extern "C" int fsync(int file) {
  char name[4096] = {};
  if (::readlink(("/proc/self/fd/" + std::to_string(file)).c_str(), name, sizeof(name) - 1) > 0)
    synced.insert(name);
  return static_cast<int>(::syscall(SYS_fsync, file));
}

namespace isograd {
namespace {

namespace fs = std::filesystem;
using error_testing::error_of;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class CheckpointFiles : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ =
        fs::path(::testing::TempDir()) / ("isograd-" + std::to_string(getpid()) + "-" +
                                          ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::create_directories(root_);
  }
  void TearDown() override { fs::remove_all(root_); }

  // Writes two files whose content contains the step and the attempt, so that a mixture of two saves cannot
  // pass.
  void save(std::int64_t step, const std::string& content, const Moment& moment = {}) {
    publish_directory(
        checkpoint_path(root_, step),
        [&](const fs::path& folder) {
          write_file(folder / "a.safetensors", content + content);
          if (moment) moment("first file");
          write_file(folder / "state.json", content);
        },
        moment);
  }
  std::string content(const fs::path& directory) {
    verify_checksums(directory);
    const std::string state = read_file(directory / "state.json");
    EXPECT_EQ(read_file(directory / "a.safetensors"), state + state);
    return state;
  }
  std::vector<std::string> names() {
    std::vector<std::string> result;
    for (const auto& path : list_checkpoints(root_)) result.push_back(path.filename());
    return result;
  }
  std::size_t entries() { return static_cast<std::size_t>(std::distance(fs::directory_iterator(root_), {})); }

  fs::path root_;
};

TEST_F(CheckpointFiles, ListsByStepAndResolvesLatest) {
  for (std::int64_t step : {100, 20, 123456789}) save(step, "x");
  fs::create_directory(root_ / "step-00000200");           // no checksums: not complete
  fs::create_directory(root_ / ".step-00000300.partial");  // being written
  EXPECT_THAT(names(), ElementsAre("step-00000020", "step-00000100", "step-123456789"));
  EXPECT_EQ(resolve_checkpoint(root_, "latest").filename(), "step-123456789");
  EXPECT_THAT(error_of([&] { resolve_checkpoint(root_ / "none", "latest"); }),
              HasSubstr("no complete checkpoint"));
  EXPECT_THAT(error_of([&] { resolve_checkpoint(root_, (root_ / "step-00000200").string()); }),
              HasSubstr("without checksums.json"));
}

TEST_F(CheckpointFiles, PruningKeepsTheNewestAndDropsTheFutureNotTaken) {
  for (std::int64_t step : {10, 20, 30, 40, 50}) save(step, "x");
  prune_checkpoints(root_, 40, 2, 0);
  EXPECT_THAT(names(), ElementsAre("step-00000030", "step-00000040"));
  prune_checkpoints(root_, 40, 1, 0);
  EXPECT_THAT(names(), ElementsAre("step-00000040"));
  EXPECT_EQ(entries(), 1u);
}

TEST_F(CheckpointFiles, TheBestAreKeptBesidesTheNewest) {
  const auto with_loss = [&](std::int64_t step, const std::string& loss) {
    publish_directory(checkpoint_path(root_, step), [&](const fs::path& folder) {
      write_file(folder / "state.json", "{\"validation_loss\": " + loss + "}");
    });
  };
  const std::pair<std::int64_t, const char*> losses[] = {
      {10, "3"}, {20, "1.5"}, {30, "null"}, {40, "2"}, {50, "1.5"}, {60, "\"low\""}, {70, "1"}};
  for (const auto& [step, loss] : losses) with_loss(step, loss);
  EXPECT_EQ(resolve_checkpoint(root_, "best").filename(), "step-00000070");
  prune_checkpoints(root_, 60, 1, 2);  // 70 is a step that the run has not made
  EXPECT_THAT(names(), ElementsAre("step-00000020", "step-00000050", "step-00000060"));
  EXPECT_EQ(resolve_checkpoint(root_, "best").filename(), "step-00000020") << "of equal ones the first";
  EXPECT_EQ(resolve_checkpoint(root_, "latest").filename(), "step-00000060");
  prune_checkpoints(root_, 60, 1, 0);
  EXPECT_THAT(names(), ElementsAre("step-00000060"));
  EXPECT_THAT(error_of([&] { resolve_checkpoint(root_, "best"); }), HasSubstr("with a validation loss"));
  EXPECT_EQ(resolve_checkpoint(root_, "auto").filename(), "step-00000060");
  EXPECT_EQ(resolve_checkpoint(root_ / "none", "auto"), fs::path());
}

// Space is lost then, not the run: the new checkpoint is whole, and the old one is no checkpoint any more.
TEST_F(CheckpointFiles, AnOldOneThatCannotBeRemovedStopsNothing) {
  for (std::int64_t step : {10, 20}) save(step, "x");
  const fs::path old = root_ / "step-00000010";
  fs::permissions(old, fs::perms(0555));
  const bool root = ::geteuid() == 0;  // root may remove everything; other users may not
  if (root) {
    ASSERT_EQ(::chown(root_.c_str(), 65534, 65534), 0);
    ASSERT_EQ(::seteuid(65534), 0);
  }
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(error_of([&] { prune_checkpoints(root_, 20, 1, 0); }), "no error");
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(error_of([&] { save(30, "y"); }), "no error") << "nor does what is left stop the next save";
  if (root) ASSERT_EQ(::seteuid(0), 0);
  EXPECT_THAT(said, HasSubstr("could not be removed (Permission denied)"));
  EXPECT_THAT(names(), ElementsAre("step-00000020", "step-00000030"));
  EXPECT_EQ(content(root_ / "step-00000030"), "y");
  for (const auto& left : fs::directory_iterator(root_)) fs::permissions(left.path(), fs::perms(0755));
}

TEST_F(CheckpointFiles, AFailureWhileWritingLeavesNothingBehind) {
  save(10, "old");
  EXPECT_THROW(save(10, "new",
                    [](std::string_view at) {
                      if (at == "first file") throw std::runtime_error("planted");
                    }),
               std::runtime_error);
  EXPECT_EQ(content(root_ / "step-00000010"), "old");
  EXPECT_EQ(entries(), 1u);
}

// If the parents' entries are not on disk, a power loss removes the first checkpoint of a run.
TEST_F(CheckpointFiles, TheParentsOfANewFolderAreSynced) {
  const fs::path base = fs::canonical(root_);
  root_ = base / "runs/new/checkpoints";
  synced.clear();
  EXPECT_THROW(save(10, "ten"), ConfigError) << "a run's folder that has gone is not made anew";
  EXPECT_FALSE(fs::exists(base / "runs"));
  make_folders(base / "runs/new");  // as a run's begin does
  save(10, "ten");
  for (const fs::path& folder : {base, base / "runs", base / "runs/new", root_})
    EXPECT_TRUE(synced.contains(folder)) << folder;
  synced.clear();
  save(20, "twenty");
  EXPECT_FALSE(synced.contains(base)) << "once is enough";
  root_ = base;
}

// Saves in a child process that is killed at the n-th moment; returns whether it got that far.
bool killed_at(int n, const std::function<void(const Moment&)>& work) {
  const pid_t child = fork();
  if (child == 0) {
    int count = 0;
    work([&](std::string_view) {
      if (count++ == n) raise(SIGKILL);
    });
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status);
}

TEST_F(CheckpointFiles, AKillAtAnyMomentLeavesAWholeCheckpoint) {
  save(10, "ten");
  int moments = 0;
  while (killed_at(moments, [&](const Moment& moment) {
    save(20, "twenty", moment);
    prune_checkpoints(root_, 20, 1, 0, moment);
  })) {
    ++moments;
    const fs::path latest = resolve_checkpoint(root_, "latest");
    EXPECT_EQ(content(latest), latest.filename() == "step-00000010" ? "ten" : "twenty")
        << "moment " << moments;
    for (const auto& path : list_checkpoints(root_)) content(path);
    if (latest.filename() != "step-00000010") {  // for the next round
      fs::remove_all(latest);
      save(10, "ten");
    }
  }
  EXPECT_GE(moments, 9);
  EXPECT_THAT(names(), ElementsAre("step-00000020"));
  EXPECT_EQ(entries(), 1u) << "leftovers of killed saves";
}

TEST_F(CheckpointFiles, AKillWhileSavingTheSameStepAgainLeavesTheOldOrTheNew) {
  std::string last = "try 0";
  save(10, last);
  int moments = 0;
  for (;; ++moments) {
    const std::string next = "try " + std::to_string(moments + 1);
    const bool killed = killed_at(moments, [&](const Moment& moment) { save(10, next, moment); });
    const std::string found = content(resolve_checkpoint(root_, "latest"));
    EXPECT_TRUE(found == last || found == next) << found << " at moment " << moments;
    last = found;
    if (!killed) break;
  }
  EXPECT_GE(moments, 8);
  EXPECT_EQ(last, "try " + std::to_string(moments + 1));
  EXPECT_EQ(entries(), 1u);
}

TEST_F(CheckpointFiles, AFullDiskIsNamedAndLeavesThePreviousWhole) {
  save(10, "ten");
  const pid_t child = fork();
  if (child == 0) {
    // A limit of the size of files acts like a disk with that much room left.
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{4096, 4096};
    setrlimit(RLIMIT_FSIZE, &limit);
    const std::string message = error_of([&] { save(20, std::string(100000, 'x')); });
    _exit(message.find("step-00000020") != std::string::npos &&
                  message.find("a.safetensors") != std::string::npos
              ? 0
              : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(content(resolve_checkpoint(root_, "latest")), "ten");
  EXPECT_EQ(entries(), 1u);
}

TEST_F(CheckpointFiles, DamageIsNamedFileByFile) {
  save(10, "ten");
  save(20, "twenty");
  const fs::path directory = root_ / "step-00000020";
  const auto whole = [&](const char* name) { return read_file(directory / name); };
  const auto overwrite = [&](const char* name, const std::string& text) {
    std::ofstream(directory / name, std::ios::binary) << text;
  };
  for (const char* name : {"a.safetensors", "state.json", "checksums.json"}) {
    const std::string text = whole(name);
    for (std::size_t at = 0; at < text.size(); at += std::max<std::size_t>(1, text.size() / 40)) {
      std::string flipped = text;
      flipped[at] = static_cast<char>(flipped[at] ^ 4);
      overwrite(name, flipped);
      const std::string message = error_of([&] { verify_checksums(directory); });
      // Blanks of the listing carry nothing: a flipped one may still parse to the same listing.
      if (message != "no error" || std::string_view(name) != "checksums.json") {
        EXPECT_THAT(message, HasSubstr(name)) << "byte " << at;
      }
    }
    overwrite(name, text.substr(0, text.size() - 1 - (std::string_view(name) == "checksums.json")));
    EXPECT_THAT(error_of([&] { verify_checksums(directory); }), HasSubstr(name));
    fs::remove(directory / name);
    EXPECT_THAT(error_of([&] { verify_checksums(directory); }), HasSubstr(name));
    overwrite(name, text);
    verify_checksums(directory);
  }
  overwrite("a.safetensors", "short");
  EXPECT_THAT(error_of([&] { verify_checksums(directory); }),
              HasSubstr("resume from " + (root_ / "step-00000010").string()));
  overwrite("a.safetensors", "twentytwenty");
  overwrite("model.safetensors.index.json", "{}");
  EXPECT_THAT(error_of([&] { verify_checksums(directory); }), HasSubstr("not saved with the checkpoint"));
}

}  // namespace
}  // namespace isograd
