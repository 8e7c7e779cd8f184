// Ranks as processes over shm: starting, losing, signalling and ending them. Guarantees of shm alone are
// tested here (a lost rank is named within a second, with its operation); launch_mpi_test.cpp has MPI's, and
// what both have.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <sstream>
#include <thread>

#include "comm/environment.hpp"
#include "comm/launch_testing.hpp"
#include "comm/store.hpp"
#include "isograd/error.hpp"
#include "isograd/world.hpp"

extern char** environ;

namespace isograd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST_F(Launch, RankZeroHostsTheStoreWhereNobodyDoes) {
  const Listener free = listen_on("127.0.0.1", 0);
  ::close(free.descriptor);
  const std::string port = "MASTER_PORT=" + std::to_string(free.port);
  ASSERT_EQ(launch_ranks({"env", "-u", kLaunchedVariable, port, kProgram, "shm", "operations", folder_},
                         {.ranks = 2}),
            0);
  EXPECT_THAT(left("0.done") + left("1.done"), AllOf(HasSubstr("right"), ::testing::Not(HasSubstr("wrong"))));
}

struct Loss {
  int ranks, victim, delay_ms;
  const char* where;
};

// Every survivor names a killed rank within a second, whatever the rank was doing.
TEST_F(Launch, KilledRankIsNamedWithinASecond) {
  for (const Loss& loss : {Loss{2, 0, 100, "absent"}, Loss{3, 2, 50, "absent"}, Loss{2, 1, 30, "staged"},
                           Loss{3, 1, 55, "staged"}, Loss{2, 1, 35, "shared"}, Loss{4, 0, 60, "shared"}}) {
    const std::string victim = std::to_string(loss.victim);
    EXPECT_EQ(launch(loss.ranks, {"lose", folder_, victim, std::to_string(SIGKILL),
                                  std::to_string(loss.delay_ms), loss.where, "60000"}),
              3);
    for (int r = 0; r < loss.ranks; ++r) {
      if (r == loss.victim) continue;
      std::istringstream text(left(std::to_string(r) + ".error"));
      double milliseconds = -1;
      std::string message;
      text >> milliseconds;
      std::getline(text >> std::ws, message);
      EXPECT_GE(milliseconds, 0) << loss.where;
      EXPECT_LT(milliseconds, 1000) << loss.where;
      EXPECT_THAT(message,
                  AllOf(HasSubstr("PeerError: all_reduce #"), HasSubstr("rank " + victim + " (host "),
                        HasSubstr("pid "), HasSubstr("has ended")))
          << loss.where << ", rank " << r << " of " << loss.ranks;
    }
    for (const auto& entry : fs::directory_iterator(folder_)) fs::remove(entry);
  }
}

TEST_F(Launch, StoppedRankIsNamedAtTheTimeout) {
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(launch(2, {"lose", folder_, "1", std::to_string(SIGSTOP), "20", "shared", "2000"}, 60000), 3);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10))
      << "a stopped rank cannot use the grace";
  EXPECT_THAT(left("0.error"),
              AllOf(HasSubstr("rank 1 (host "), HasSubstr("stopped) did not arrive within 2000 ms")));
}

TEST_F(Launch, ReasonOfAFailingRankReachesTheOthers) {
  EXPECT_EQ(launch(3, {"throw", folder_}), 3);
  EXPECT_THAT(left("1.error"), HasSubstr("ConfigError: rank 1's file"));
  for (const char* name : {"0.error", "2.error"}) {
    EXPECT_THAT(left(name), AllOf(HasSubstr("of group 'world'"), HasSubstr("rank 1 failed"),
                                  HasSubstr("rank 1's file: found a hole")));
  }
}

TEST_F(Launch, TooLittleSharedMemoryIsAConfigErrorOnAllRanks) {
  EXPECT_EQ(launch(2, {"memory", folder_}), 0);
  EXPECT_THAT(left("0.error"), AllOf(HasSubstr("2\nConfigError: shared memory"), HasSubstr("rank 1"),
                                     HasSubstr("16781312 bytes on each of 2 ranks")));
  EXPECT_THAT(left("1.error"), AllOf(HasSubstr("2\nConfigError: shared memory"), HasSubstr("ulimit -f")));
}

// A rank ends before it has published who it is. The launcher reports it to the ranks that wait.
TEST_F(Launch, RankThatIsKilledDuringStartEndsTheOthersAtOnce) {
  for (const char* end : {"kill -9 $$", "exit 5"}) {
    const auto begin = std::chrono::steady_clock::now();
    const std::string script =
        std::string("[ $RANK = 1 ] && ") + end + "; exec \"$0\" shm operations \"$1\" 2>\"$1\"/$RANK.said";
    EXPECT_EQ(launch_ranks({"sh", "-c", script, kProgram, folder_},
                           {.ranks = 3, .grace = std::chrono::seconds(60)}),
              3);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20)) << end;
    for (const char* name : {"0.said", "2.said"})
      EXPECT_THAT(left(name), AllOf(HasSubstr("joining group 'world'"), HasSubstr("rank 1 (pid "))) << end;
  }
}

TEST_F(Launch, RanksListenOnNoNetwork) {
  ASSERT_EQ(launch(1, {"listeners", folder_}), 0);
  const std::string of_this_process = left("0.listeners");  // another test's Gloo has some
  ASSERT_EQ(launch(2, {"listeners", folder_}), 0);
  for (const char* rank : {"0.listeners", "1.listeners"}) EXPECT_EQ(left(rank), of_this_process) << rank;
}

TEST_F(Launch, AHangUpThatIsIgnoredIsIgnoredByTheRanks) {
  const auto before = ::signal(SIGHUP, SIG_IGN);  // nohup
  EXPECT_EQ(launch_ranks({"sh", "-c", "kill -HUP $$; exit 6"}, {.ranks = 1}), 6);
  ::signal(SIGHUP, before);
  EXPECT_EQ(launch_ranks({"sh", "-c", "kill -HUP $$; exit 6"}, {.ranks = 1}), 3);
}

TEST_F(Launch, StatusSaysWhichRankWasLost) {
  const auto shell = [](const char* script) { return launch_ranks({"sh", "-c", script}, {.ranks = 2}); };
  EXPECT_EQ(shell("[ $RANK = 1 ] && sleep 0.2 && exit 3; exit 4"), 3)
      << "a lost peer says more than its consequences";
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(shell("[ $RANK = 0 ] || kill -11 $$"), 3);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("rank 1 (pid "));
  EXPECT_THROW(launch_ranks({}, {.ranks = 2}), ConfigError);
  EXPECT_THROW(launch_ranks({kProgram}, {.ranks = 0}), ConfigError);
}

TEST_F(Launch, ARankThatIsToBeRunAgainHasNotFailed) {
  const auto status = [](const char* script, int grace_ms = 10'000) {
    return launch_ranks({"sh", "-c", script}, {.ranks = 2, .grace = std::chrono::milliseconds(grace_ms)});
  };
  EXPECT_EQ(status("exit 75"), kStatusAgain);
  EXPECT_EQ(status("[ $RANK = 0 ] && exit 75; sleep 0.6; exit 0"), kStatusAgain);
  EXPECT_EQ(status("[ $RANK = 0 ] && exit 75; sleep 0.2; exit 4"), 4) << "a failure says more";
  EXPECT_EQ(status("[ $RANK = 0 ] && exit 4; sleep 0.2; exit 75"), 4);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(status("[ $RANK = 0 ] && exit 75; exec sleep 60", 100), kStatusAgain);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30)) << "the other was not ended";
}

// The status of the ranks stays that of a launcher that held the signals before.
TEST_F(Launch, HeldSignalsAreHeldAgainWhenTheRanksHaveEnded) {
  const auto launched_then_signalled = [](bool holds) {
    sigset_t both;
    sigemptyset(&both), sigaddset(&both, SIGUSR1), sigaddset(&both, SIGUSR2);
    ::pthread_sigmask(holds ? SIG_BLOCK : SIG_UNBLOCK, &both, nullptr);
    const int status = launch_ranks({"sh", "-c", "exit 75"}, {.ranks = 2});
    ::kill(::getpid(), SIGUSR1);
    ::kill(::getpid(), SIGUSR2);
    ::_exit(status);
  };
  EXPECT_EXIT(launched_then_signalled(true), ::testing::ExitedWithCode(kStatusAgain), "");
  EXPECT_EXIT(launched_then_signalled(false), ::testing::KilledBySignal(SIGUSR1), "");
}

TEST_F(Launch, SignalsToSaveArePassedOn) {
  for (const int number : {SIGUSR1, SIGUSR2}) {
    const std::string script =
        "trap 'echo > \"$0\"/$RANK.told; exit 0' USR1 USR2; echo > \"$0\"/$RANK.ready;"
        "while :; do sleep 0.05; done";
    std::thread user([&] {
      ASSERT_TRUE(wait_for("0.ready") && wait_for("1.ready"));
      ::kill(::getpid(), number);
    });
    EXPECT_EQ(launch_ranks({"sh", "-c", script, folder_.string()}, {.ranks = 2}), 0);
    user.join();
    for (const char* name : {"0.told", "1.told", "0.ready", "1.ready"})
      EXPECT_TRUE(fs::remove(folder_ / name)) << name;
  }
}

// One that comes before a rank handles it does not end it. In bash, because dash unblocks all signals.
TEST_F(Launch, HeldSignalsWaitForTheRank) {
  const std::string script = "echo > \"$0\"/$RANK.ready; sleep 0.5; exit 0";
  for (const bool holds : {false, true}) {
    std::thread user([&] {
      ASSERT_TRUE(wait_for("0.ready") && wait_for("1.ready"));
      ::kill(::getpid(), SIGUSR1);
    });
    const int status =
        launch_ranks({"bash", "-c", script, folder_.string()}, {.ranks = 2, .holds_user_signals = holds});
    EXPECT_EQ(status, holds ? 0 : 128 + SIGUSR1);
    user.join();
    for (const char* name : {"0.ready", "1.ready"}) fs::remove(folder_ / name);
  }
}

// One rank fails. The other does not end by itself or on SIGTERM.
TEST_F(Launch, FailureEndsTheOtherRanks) {
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(launch_ranks({"sh", "-c", "[ $RANK = 1 ] && exit 5; trap '' TERM; while :; do sleep 0.1; done"},
                         {.ranks = 2, .grace = std::chrono::milliseconds(300)}),
            5);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
}

TEST_F(Launch, RanksEndWhenTheLauncherIsKilled) {
  const std::string folder = folder_;
  const char* arguments[] = {kProgram.c_str(), "shm", "launch", folder.c_str(), nullptr};
  pid_t launcher = -1;
  ASSERT_EQ(
      ::posix_spawn(&launcher, kProgram.c_str(), nullptr, nullptr, const_cast<char**>(arguments), environ),
      0);
  ASSERT_TRUE(wait_for("0.pid") && wait_for("1.pid"));
  ::kill(launcher, SIGKILL);
  ASSERT_EQ(::waitpid(launcher, nullptr, 0), launcher);
  for (const char* name : {"0.pid", "1.pid"}) {
    const pid_t rank = std::stoi(left(name));
    bool gone = false;
    for (int i = 0; i < 300 && !gone; ++i) {  // a zombie waits for init to reap it
      const std::string status = read("/proc/" + std::to_string(rank) + "/stat");
      gone = status.empty() || status.find(") Z ") != std::string::npos;
      if (!gone) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    EXPECT_TRUE(gone) << name;
  }
}

}  // namespace
}  // namespace isograd
