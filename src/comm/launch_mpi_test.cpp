// Process ranks over each backend, and the guarantees of MPI where they differ from shm's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include "comm/group_testing.hpp"
#include "comm/launch_testing.hpp"
#include "full_tests.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class EachBackend : public Launch, public ::testing::WithParamInterface<std::string> {
 protected:
  void all_right(int ranks, const std::string& mode, const std::string& said = "right") {
    ASSERT_EQ(launch(ranks, {mode, folder_}, 3000, GetParam()), 0) << mode << " on " << ranks;
    for (int r = 0; r < ranks; ++r) {
      EXPECT_THAT(left(std::to_string(r) + ".done"), HasSubstr(said)) << mode << ", " << r << " of " << ranks;
    }
    for (const auto& entry : fs::directory_iterator(folder_)) fs::remove(entry);
  }
  // `r` is the rank, $0 the folder.
  int shell(int ranks, const std::string& script, bool prefix_output = false) {
    return launch_ranks({"sh", "-c", "r=${RANK:-$OMPI_COMM_WORLD_RANK$PMI_RANK}; " + script, folder_},
                        {.ranks = ranks,
                         .grace = std::chrono::seconds(3),
                         .prefix_output = prefix_output,
                         .backend = GetParam()});
  }
  // Signals this process once both ranks have said who they are.
  std::thread user(int signal) {
    return std::thread([this, signal] {
      ASSERT_TRUE(wait_for("0.pid") && wait_for("1.pid"));
      ::kill(::getpid(), signal);
    });
  }
};

TEST_P(EachBackend, ProcessRanksCommunicate) {
  for (const int ranks : {1, 2, 3, 4}) all_right(ranks, "operations", "right threads=1 host=");
}

TEST_P(EachBackend, EveryOperationOfEveryTypeAndSize) {
  for (const int ranks : {2, 4}) all_right(ranks, "matrix");
}

TEST_P(EachBackend, SubgroupsOverlapAndCoexist) {
  for (const int ranks : {2, 3, 4}) all_right(ranks, "subgroups");
}

TEST_P(EachBackend, StatusSaysWhatHappened) {
  EXPECT_EQ(shell(3, "exit 0"), 0);
  EXPECT_EQ(shell(3, "[ $r != 1 ] || exit 7"), 7);
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(shell(2, "[ $r = 0 ] || kill -11 $$"), 3);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("signal 11"));
  EXPECT_THROW(launch_ranks({"no-such-program-here"}, {.ranks = 2, .backend = GetParam()}), ConfigError);
  EXPECT_THROW(launch_ranks({"true"}, {.ranks = 2, .backend = "carrier-pigeon"}), ConfigError);
}

TEST_P(EachBackend, OutputCarriesTheRank) {
  ::testing::internal::CaptureStdout();
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(shell(2, "printf 'one\\ntwo'; echo to stderr >&2; printf ' and a half\\nno end'", true), 0);
  const std::string out = ::testing::internal::GetCapturedStdout(),
                    err = ::testing::internal::GetCapturedStderr();
  for (const std::string rank : {"[0] ", "[1] "}) {
    EXPECT_THAT(out, AllOf(HasSubstr(rank + "one\n"), HasSubstr(rank + "two and a half\n"),
                           HasSubstr(rank + "no end\n")));
    EXPECT_THAT(err, HasSubstr(rank + "to stderr\n"));
  }
}

// The shell handles the signal when its sleep ends. A second one would be counted too.
TEST_P(EachBackend, SignalIsPassedOnOnceAndTheRanksDecide) {
  std::thread terminates = user(SIGTERM);
  EXPECT_EQ(shell(2,
                  "n=0; trap 'n=$((n+1))' TERM; cd \"$0\"; echo > $r.pid; "
                  "while [ $n = 0 ]; do sleep 0.05; done; sleep 0.1; printf $n > $r.count"),
            0);
  terminates.join();
  EXPECT_EQ(left("0.count") + left("1.count"), "11");
}

TEST_P(EachBackend, RanksEndedByAPassedOnSignalGiveItsStatus) {
  std::thread interrupts = user(SIGINT);
  EXPECT_EQ(shell(2, "echo > \"$0\"/$r.pid; exec sleep 60"), 128 + SIGINT);
  interrupts.join();
}

// shm+mpi equals one of these where the group has one host. Its tests with several hosts are below.
std::vector<std::string> plain_backends() {
  std::vector<std::string> plain = backends();
  std::erase(plain, "shm+mpi");
  return plain;
}
INSTANTIATE_TEST_SUITE_P(Backends, EachBackend, ::testing::ValuesIn(plain_backends()));

class Mpi : public Launch {
 protected:
  void SetUp() override {
    if (backends().size() < 2)
      GTEST_SKIP()
          << "needs an MPI (libopenmpi-dev and openmpi-bin), which this build was configured without";
    Launch::SetUp();
  }
  void TearDown() override {
    if (backends().size() >= 2) Launch::TearDown();
  }
};

// Every operation of c10d::Backend, and the operations that can be split, in pieces.
TEST_F(Mpi, BackendHasEveryOperation) {
  for (const int ranks : {2, 3, 4}) {
    ASSERT_EQ(launch(ranks, {"backend", folder_}, 3000, "mpi"), 0) << left("0.done");
    for (int r = 0; r < ranks; ++r) EXPECT_EQ(left(std::to_string(r) + ".done"), "right");
  }
}

// mpirun sets no MASTER_ADDR: the ranks find their store through the job's folder.
TEST_F(Mpi, RanksOfMpirunTalkThroughSharedMemoryToo) {
  for (const int ranks : {1, 2, 4}) {
    ASSERT_EQ(launch_ranks({kProgram, "shm", "operations", folder_}, {.ranks = ranks, .backend = "mpi"}), 0);
    for (int r = 0; r < ranks; ++r) EXPECT_THAT(left(std::to_string(r) + ".done"), HasSubstr("right"));
  }
}

TEST_F(Mpi, LateRankIsAPeerErrorAtTheTimeoutAndThenAtOnce) {
  EXPECT_EQ(launch(2, {"late", folder_}, 3000, "mpi"), 3);
  std::istringstream lines(left("0.late"));
  std::string first, second;
  std::getline(lines, first);
  std::getline(lines, second);
  EXPECT_GE(std::stod(first), 300);
  EXPECT_LT(std::stod(first), 1300);
  EXPECT_THAT(first, AllOf(HasSubstr("PeerError: all_reduce"), HasSubstr("#"),
                           HasSubstr("group 'world' (mpi)"), HasSubstr("not complete within 300 ms")));
  EXPECT_LT(std::stod(second), 100);
  EXPECT_THAT(second, HasSubstr("failed earlier"));
}

// mpirun ends the survivors, before or after they detect the failure.
TEST_F(Mpi, KilledRankEndsTheJob) {
  for (const int victim : {0, 1}) {
    const auto begin = std::chrono::steady_clock::now();
    ::testing::internal::CaptureStderr();
    EXPECT_NE(
        launch(3, {"lose", folder_, std::to_string(victim), std::to_string(SIGKILL), "50", "staged", "60000"},
               1000, "mpi"),
        0);
    ::testing::internal::GetCapturedStderr();
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  }
}

TEST_F(Mpi, StoppedRankEndsTheJobAtTheTimeout) {
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(launch(2, {"lose", folder_, "1", std::to_string(SIGSTOP), "20", "staged", "300"}, 1000, "mpi"),
            3);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  EXPECT_THAT(left("0.error"), HasSubstr("not complete within 300 ms"));
}

TEST_F(Mpi, RankThatThrowsEndsTheJobWithItsStatus) {
  EXPECT_EQ(launch(3, {"throw", folder_}, 1000, "mpi"), 2);
  EXPECT_THAT(left("1.error"), HasSubstr("ConfigError: rank 1's file"));
}

// Ranks of one machine that claim to be on several hosts.
class SeveralHosts : public Mpi {
 protected:
  void TearDown() override {
    ::unsetenv("ISOGRAD_HOST");
    Mpi::TearDown();
  }
  int on(const std::string& hosts, int ranks, const std::vector<std::string>& command,
         const std::string& backend = "shm+mpi") {
    ::setenv("ISOGRAD_HOST", hosts.c_str(), 1);
    return launch(ranks, command, 1000, backend);
  }
};

TEST_F(SeveralHosts, SharedMemoryWithinAndMpiAcross) {
  ASSERT_EQ(on("a,a,b,b", 4, {"hosts", folder_}), 0);
  // Sums within a host (shared memory), across and over all; then bytes across hosts: none within, half of
  // the 8000 there and back across, and half of that for all, as one of two lanes of two hosts.
  EXPECT_EQ(left("0.done"), "0011 a/b 1 memory 2 6 0 8000 12000");
  EXPECT_EQ(left("3.done"), "0011 a/b 5 memory 4 6 0 8000 12000");
  if (!isograd::full_tests()) return;
  ASSERT_EQ(on("alpha", 4, {"hosts", folder_}), 0);  // one host: shared memory alone
  EXPECT_EQ(left("3.done"), "0000 alpha 5 memory 4 memory 6 memory 0 0 0");
  ASSERT_EQ(on("a,a,b,b", 4, {"hosts", folder_}, "mpi"), 0);  // as a ring: ranks 1 and 3 send across
  EXPECT_EQ(left("2.done"), "0011 a/b 5 2 6 0 8000 8000");
  EXPECT_EQ(left("3.done"), "0011 a/b 5 4 6 0 8000 20000");
}

TEST_F(SeveralHosts, EveryOperationAndSubgroupsOfEveryOrder) {
  ASSERT_EQ(on("a,a,b,b,b", 5, {"operations", folder_}), 0);
  for (int rank = 0; rank < 5; ++rank)
    EXPECT_THAT(left(std::to_string(rank) + ".done"), AllOf(HasSubstr("right"), HasSubstr("host=")));
  if (!isograd::full_tests()) return;
  ASSERT_EQ(on("a,b,a", 3, {"subgroups", folder_}), 0);
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(left(std::to_string(rank) + ".done"), "right");
}

TEST_F(SeveralHosts, HostThatIsLateIsNamed) {
  EXPECT_EQ(on("a,a,b", 3, {"late", folder_}), 3);
  EXPECT_THAT(left("0.late"),
              AllOf(HasSubstr("group 'world' (shm+mpi)"), HasSubstr("nothing from host b (rank 2)")));
}

TEST_F(SeveralHosts, SharedMemoryAloneRefusesThem) {
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(on("a,b", 2, {"operations", folder_}, "shm"), 2);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("rank 0 on host a and rank 1 on host b"), HasSubstr("--backend shm+mpi")));
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(on("a,b,c", 2, {"operations", folder_}), 2);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("3 names for 2 ranks"));
}

TEST_F(SeveralHosts, RanksThatWereStartedWithDifferentBackendsAreRefused) {
  ::testing::internal::CaptureStderr();
  const char* script =
      "b=mpi; [ $OMPI_COMM_WORLD_RANK$PMI_RANK = 0 ] || b=shm+mpi; exec \"$0\" $b operations /tmp";
  EXPECT_EQ(launch_ranks({"sh", "-c", script, kProgram}, {.ranks = 2, .backend = "mpi"}), 2);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("'shm+mpi' on rank 1"));
}

}  // namespace
}  // namespace isograd
