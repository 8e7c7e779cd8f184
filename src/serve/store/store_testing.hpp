// A folder for a test, a limit on the size of files that stands for a full disk, and an fdatasync that
// counts.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <string>
#include <thread>

namespace isograd::serve::store_testing {

class Folder : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "isograd-store-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    directory_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }
  std::filesystem::path directory_;
};

// No file may grow beyond `bytes`: write() returns fewer bytes and then fails with EFBIG, as on a full disk
// with ENOSPC.
class FullDisk {
 public:
  explicit FullDisk(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    getrlimit(RLIMIT_FSIZE, &old_);
    const rlimit small{.rlim_cur = bytes, .rlim_max = old_.rlim_max};
    EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  }
  ~FullDisk() {
    setrlimit(RLIMIT_FSIZE, &old_);
    std::signal(SIGXFSZ, handler_);
  }
  FullDisk(const FullDisk&) = delete;
  FullDisk& operator=(const FullDisk&) = delete;

 private:
  rlimit old_{};
  void (*handler_)(int);
};

// Counts those of this process. A slow disk waits for `sync_time`, a broken one fails.
inline std::atomic<int> syncs_begun = 0, syncs = 0;
inline std::atomic<bool> syncs_fail = false;
inline std::chrono::milliseconds sync_time{0};

}  // namespace isograd::serve::store_testing

extern "C" inline __attribute__((used)) int fdatasync(int file) {
  namespace testing = isograd::serve::store_testing;
  ++testing::syncs_begun;
  std::this_thread::sleep_for(testing::sync_time);
  ++testing::syncs;
  if (!testing::syncs_fail) return static_cast<int>(::syscall(SYS_fdatasync, file));
  errno = EIO;
  return -1;
}
