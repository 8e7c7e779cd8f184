// Failures between thread ranks, and the error that each rank gets.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <torch/headeronly/version.h>
#include <algorithm>
#include <filesystem>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "base/error_testing.hpp"
#include "base/files.hpp"
#include "comm/failures.hpp"
#include "comm/hosts/meeting.hpp"
#include "comm/shm/backend.hpp"
#include "comm/shm/members.hpp"
#include "isograd/error.hpp"
#include "isograd/world.hpp"

namespace isograd {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

// The message of the PeerError that `action` must throw.
constexpr auto peer_error = [](auto&& action) { return error_testing::error_of<PeerError>(action); };

TEST(RunRanks, RethrowsTheFirstErrorWithItsRankAndFamily) {
  const auto throw_on = [](int rank, auto error) {
    return [=](World& world) {
      if (world.rank == rank) throw error;
      world.group.barrier();
    };
  };
  const ErrorText text{.where = "here", .found = "a hole", .expected = "none", .action = "Fix it"};
  for (int size : {1, 2, 4}) {
    const int rank = size - 1;
    const std::string named = "rank " + std::to_string(rank) + ": here";
    try {
      run_ranks(size, throw_on(rank, ConfigError(text)));
      FAIL();
    } catch (const ConfigError& error) {
      EXPECT_EQ(error.text().where, named);
      EXPECT_EQ(error.text().found, "a hole");
    }
    EXPECT_THROW(run_ranks(size, throw_on(rank, PeerError(text))), PeerError);
    EXPECT_THROW(run_ranks(size, throw_on(rank, BrokenInvariant(text))), BrokenInvariant);
    try {
      run_ranks(size, throw_on(rank, std::runtime_error("unforeseen")));
      FAIL();
    } catch (const std::runtime_error& error) {
      EXPECT_EQ(error.what(), "rank " + std::to_string(rank) + ": unforeseen");
    }
    EXPECT_THROW(run_ranks(size, throw_on(rank, 42)), std::runtime_error);
  }
  EXPECT_THROW(run_ranks(0, [](World&) {}), ConfigError);
}

// A rank that throws leaves its groups before its error is recorded. A peer's error that follows from it may
// be recorded earlier, and may have been caught and passed on.
TEST(RunRanks, RethrowsTheCauseThoughAConsequenceIsFaster) {
  struct Sleeps {
    const bool at_all;
    ~Sleeps() {
      if (at_all) std::this_thread::sleep_for(300ms);
    }
  };
  const ErrorText text{.where = "here", .found = "a hole", .expected = "none", .action = "Fix it"};
  for (const bool of_peers : {false, true})
    for (const int size : {3, 4, 5}) try {
        run_ranks(size, [&](World& world) {
          const Sleeps after_its_groups{world.rank == 1};
          if (world.rank > 1) return world.group.barrier();
          Group pair = world.subgroup({0, 1}, "pair");
          if (world.rank == 1 && of_peers) throw PeerError(text);
          if (world.rank == 1) throw std::runtime_error("a hole");
          try {
            pair.barrier();
          } catch (const PeerError& error) {
            throw PeerError(error.text());
          }
        });
        FAIL();
      } catch (const std::exception& error) {
        EXPECT_THAT(error.what(), AllOf(HasSubstr("rank 1: "), HasSubstr("a hole"))) << size;
      }
}

TEST(Failure, ThrowingRankEndsTheOthersAtOnceWithItsReason) {
  const auto begin = std::chrono::steady_clock::now();
  std::string messages[3];
  EXPECT_THROW(run_ranks(3,
                         [&](World& world) {
                           at::Tensor shared = world.group.empty_shared(10, at::kFloat);
                           if (world.rank == 1) throw std::runtime_error("disk on fire");
                           Pending pending;
                           // The start may already throw.
                           messages[world.rank] = peer_error([&] {
                             pending = world.group.all_reduce_async(shared);
                             pending.wait();
                           });
                           // every later operation throws it again
                           EXPECT_THAT(peer_error([&] { world.group.barrier(); }), HasSubstr("disk on fire"));
                         }),
               std::runtime_error);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 5s) << "the timeout is 5 minutes";
  for (int r : {0, 2}) {
    EXPECT_THAT(messages[r],
                AllOf(HasSubstr("all_reduce #"), HasSubstr("of group 'world' on rank " + std::to_string(r)),
                      HasSubstr("rank 1 failed: disk on fire")));
  }
}

TEST(Failure, FailedPendingSaysSoAgain) {
  run_ranks(2, [](World& world) {
    world.group.barrier();
    if (world.rank == 1) return;
    Pending pending = world.group.all_reduce_async(at::ones({10}));
    for (int i = 0; i < 3; ++i) EXPECT_THAT(peer_error([&] { pending.wait(); }), HasSubstr("left the group"));
    EXPECT_THAT(peer_error([&] { pending.progress(); }), HasSubstr("left the group"));
  });
}

TEST(Failure, TheLastOperationsGoToAFileWhereThereIsOne) {
  const auto folder = std::filesystem::temp_directory_path() / fmt::format("isograd-operations-{}", getpid());
  std::filesystem::create_directories(folder);
  // Rank 1 leaves, or calls something else than rank 0.
  const auto said = [](bool leaves = true) {
    ::testing::internal::CaptureStderr();
    run_ranks(2, [&](World& world) {
      for (int i = 0; i < 70; ++i) world.group.all_reduce(at::ones({i + 1}));
      if (world.rank == 1 && leaves) return;
      EXPECT_THAT(peer_error([&] {
                    if (world.rank == 0) world.group.barrier();
                    world.group.all_reduce(at::ones({2}));
                  }),
                  HasSubstr(leaves ? "left the group" : "barrier"));
    });
    return ::testing::internal::GetCapturedStderr();
  };
  const auto in_file = folder / "operations.txt";
  {
    const OperationsFile file(in_file);
    for (int times : {1, 2}) {
      EXPECT_EQ(said(), fmt::format("isograd: the last operations of rank 0 in group 'world': {}\n",
                                    in_file.string()));
      const std::string text = read_file(in_file);
      EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 65 * times) << "64 operations and a heading";
      EXPECT_THAT(text, AllOf(HasSubstr("rank 0 in group 'world', oldest first:\n"),
                              HasSubstr(" all_reduce(sum) of 70 Float"), HasSubstr(" barrier")));
    }
    const OperationsFile newer(folder / "absent" / "operations.txt");
    EXPECT_THAT(said(false), AllOf(HasSubstr("oldest first:\n"), HasSubstr(" all_reduce(sum) of 70 Float")))
        << "what cannot be written is printed";
  }
  const std::string disagreed = said(false);
  EXPECT_THAT(disagreed, ::testing::MatchesRegex("isograd: .* of group 'world' on rank . of 2.*"));
  EXPECT_LT(disagreed.find(" on rank "), disagreed.find("oldest first:\n")) << "the operation is said first";
  EXPECT_THAT(disagreed, ::testing::Not(HasSubstr(": found ")))
      << "the error, which the caller prints, is printed twice";
  EXPECT_EQ(said(), "") << "why a rank left is in its own output, and in the error";
  std::filesystem::remove_all(folder);
}

// A caller who only polls also gets the error of a lost peer.
TEST(Failure, PollingNoticesALostPeer) {
  run_ranks(2, [](World& world) {
    world.group.barrier();
    if (world.rank == 1) return;
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_THAT(peer_error([&] {
                  Pending pending = world.group.all_reduce_async(at::ones({10}));
                  while (!pending.progress()) std::this_thread::sleep_for(1ms);
                }),
                HasSubstr("left the group"));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, 1s);
  });
}

TEST(Failure, LateRankIsNamedAtTheTimeout) {
  std::string messages[3];
  double waited[3] = {};
  run_ranks(3,
            [&](World& world) {
              at::Tensor tensor = at::ones({100});
              world.group.all_reduce(tensor);
              const auto begin = std::chrono::steady_clock::now();
              if (world.rank == 2) std::this_thread::sleep_for(600ms);
              messages[world.rank] = peer_error([&] { world.group.all_reduce(tensor); });
              waited[world.rank] =
                  std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
            },
            {.timeout = 200ms});
  for (int r : {0, 1}) {
    EXPECT_THAT(messages[r], AllOf(HasSubstr("all_reduce #1"), HasSubstr("rank 2 (a thread of this process)"),
                                   HasSubstr("did not arrive within 200 ms")));
    EXPECT_THAT(messages[r], ::testing::Not(HasSubstr(r == 0 ? "rank 1 (" : "rank 0 (")));
    EXPECT_GT(waited[r], 0.19);
    EXPECT_LT(waited[r], 0.55) << "named long before the late rank came";
  }
  EXPECT_THAT(messages[2], AnyOf(HasSubstr("rank 0 failed"), HasSubstr("rank 1 failed")));
}

// More ranks than cores, and the shortest timeout that a call may have.
TEST(Failure, EightRanksNameALateOneAfterTheShortestTimeout) {
  constexpr int kRanks = 8, kLate = 5;
  std::string messages[kRanks];
  double waited[kRanks] = {};
  auto store = c10::make_intrusive<c10d::HashStore>();
  run_ranks(kRanks, [&](World& world) {
    auto backend = c10::make_intrusive<ShmBackend>(store, world.rank, kRanks, "eight", 30s);
    std::vector<at::Tensor> tensors{at::ones({100})};
    c10d::AllreduceOptions options;
    backend->allreduce(tensors, options)->wait();
    EXPECT_EQ(tensors[0][99].template item<float>(), kRanks);
    options.timeout = 100ms;
    if (world.rank == kLate) {
      world.group.barrier();  // another group: the others reach it after they have given up
    } else {
      const auto begin = std::chrono::steady_clock::now();
      messages[world.rank] = peer_error([&] { backend->allreduce(tensors, options)->wait(); });
      waited[world.rank] = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      world.group.barrier();
    }
  });
  bool first_hand = false;  // the first rank to give up reports it to the others
  for (int r = 0; r < kRanks; ++r) {
    if (r == kLate) continue;
    EXPECT_THAT(messages[r], AllOf(HasSubstr("all_reduce #1"), HasSubstr("rank 5 (a thread of this process)"),
                                   HasSubstr("did not arrive within 100 ms")));
    first_hand |= waited[r] > 0.09;
    EXPECT_LT(waited[r], 1.5);
  }
  EXPECT_TRUE(first_hand);
}

TEST(Failure, RankThatLeavesIsNamed) {
  std::string message;
  run_ranks(2, [&](World& world) {
    if (world.rank == 1) return;
    message = peer_error([&] { world.group.barrier(); });
  });
  EXPECT_THAT(message, AllOf(HasSubstr("barrier #"), HasSubstr("rank 1"), HasSubstr("left the group")));
}

TEST(Failure, RankThatLeavesAfterItsPartHarmsNobody) {
  for (int round = 0; round < 20; ++round) {
    run_ranks(3, [&](World& world) {
      at::Tensor tensor = at::full({1000}, world.rank);
      world.group.broadcast(tensor, 1);
      world.group.all_reduce(tensor);
      if (world.rank == 2) std::this_thread::sleep_for(1ms * (round % 4));
      ASSERT_EQ(tensor[999].item<float>(), 3);
    });
  }
}

// Rank 0 makes one call, the others another. Every rank gets both in its error, and none waits for the
// timeout.
void expect_disagreement(const std::function<void(World&)>& zero, const std::function<void(World&)>& others,
                         const std::string& said_by_zero, const std::string& said_by_others) {
  const auto begin = std::chrono::steady_clock::now();
  std::string messages[3];
  run_ranks(3, [&](World& world) {
    messages[world.rank] = peer_error([&] { (world.rank == 0 ? zero : others)(world); });
  });
  for (const std::string& message : messages) {
    EXPECT_THAT(message, AllOf(HasSubstr("disagreed"), HasSubstr("called " + said_by_zero),
                               HasSubstr("called " + said_by_others)));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 5s);
}

TEST(Failure, DisagreementIsToldOnAllRanks) {
  const auto reduce = [](std::int64_t n, at::ScalarType dtype, ReduceOp op) {
    return [=](World& world) { world.group.all_reduce(at::zeros({n}, dtype), op); };
  };
  const auto sum7 = reduce(7, at::kFloat, ReduceOp::kSum);
  expect_disagreement(sum7, reduce(8, at::kFloat, ReduceOp::kSum), "all_reduce(sum) of 7 Float",
                      "all_reduce(sum) of 8 Float");
  expect_disagreement(sum7, reduce(7, at::kDouble, ReduceOp::kSum), "all_reduce(sum) of 7 Float",
                      "all_reduce(sum) of 7 Double");
  expect_disagreement(sum7, reduce(7, at::kFloat, ReduceOp::kMax), "all_reduce(sum) of 7 Float",
                      "all_reduce(max) of 7 Float");
  expect_disagreement(
      sum7, [](World& world) { world.group.barrier(); }, "all_reduce(sum) of 7 Float", "barrier");
  expect_disagreement([](World& world) { world.group.broadcast(at::zeros({3}), 0); },
                      [](World& world) { world.group.broadcast(at::zeros({3}), 1); },
                      "broadcast from rank 0 of 3 Float", "broadcast from rank 1 of 3 Float");
  expect_disagreement([](World& world) { world.group.empty_shared(10, at::kFloat); },
                      [](World& world) { world.group.empty_shared(11, at::kFloat); },
                      "empty_shared of 10 Float", "empty_shared of 11 Float");
  expect_disagreement([](World& world) { world.group.all_gather(at::zeros({3})); },
                      [](World& world) { world.group.all_gather(at::zeros({4})); }, "all_gather of 3 Float",
                      "all_gather of 4 Float");
}

// Rank 0 makes one extra call first, so its barrier meets the others' all_reduce.
TEST(Failure, MissingCallIsADisagreement) {
  std::string messages[2];
  run_ranks(2, [&](World& world) {
    messages[world.rank] = peer_error([&] {
      if (world.rank == 0) world.group.barrier();
      world.group.all_reduce(at::zeros({5}));
    });
  });
  for (const auto& message : messages) {
    EXPECT_THAT(message, AllOf(HasSubstr("called barrier"), HasSubstr("called all_reduce(sum) of 5 Float")));
  }
}

TEST(Failure, MemoryThatNobodyHasIsAConfigErrorAndTheGroupGoesOn) {
  run_ranks(2, [&](World& world) {
    for (std::int64_t numel : {std::int64_t{1} << 50, std::int64_t{1} << 62, std::int64_t{-1}}) {
      EXPECT_THROW(world.group.empty_shared(numel, at::kByte), ConfigError) << numel;
    }
    try {
      world.group.empty_shared(std::int64_t{1} << 50, at::kByte);
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(),
                  AllOf(HasSubstr("shared memory"), HasSubstr("available"), HasSubstr("2097152.00 GiB")));
    }
    at::Tensor one = at::ones({1});
    world.group.all_reduce(one);
    EXPECT_EQ(one.item<float>(), 2);
  });
}

TEST(Joining, RanksOfSeveralHostsAreRefusedOnAll) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::string messages[3];
  std::vector<std::thread> ranks;
  for (int r = 0; r < 3; ++r) {
    ranks.emplace_back([&, r] {
      shm::MemberInfo mine = shm::describe_self();
      if (r == 2) mine.host = "elsewhere", mine.machine = "another boot";
      try {
        shm::meet(*store, r, 3, mine, "g", 5s);
      } catch (const ConfigError& error) {
        messages[r] = error.what();
      }
    });
  }
  for (auto& rank : ranks) rank.join();
  for (const auto& message : messages) {
    EXPECT_THAT(message, AllOf(HasSubstr("rank 2 on host elsewhere"), HasSubstr("all ranks on one host")));
  }
}

TEST(Joining, RanksWithOtherLibTorchesAreRefusedOnAll) {
  for (const bool through_mpi : {false, true}) {
    auto store = c10::make_intrusive<c10d::HashStore>();
    std::string messages[3];
    std::vector<std::thread> ranks;
    for (int r = 0; r < 3; ++r) {
      ranks.emplace_back([&, r] {
        HostIdentity host = identify_host();
        EXPECT_EQ(host.torch, std::string(TORCH_VERSION).substr(0, host.torch.size()));
        if (r == 1) host.torch = "2.9";
        shm::MemberInfo mine = shm::describe_self();
        mine.torch = host.torch;
        try {
          if (through_mpi) {  // any backend carries what MPI does
            ShmBackend all(store, r, 3, "g", 5s);
            exchange_hosts(all, host, "mpi");
          } else {
            shm::meet(*store, r, 3, mine, "g", 5s);
          }
        } catch (const ConfigError& error) {
          messages[r] = error.what();
        }
      });
    }
    for (auto& rank : ranks) rank.join();
    for (const auto& message : messages)
      EXPECT_THAT(message, AllOf(HasSubstr("LibTorch 2.9 on rank 1 and 2."),
                                 HasSubstr("one version of LibTorch on all ranks")));
  }
}

TEST(Joining, RankThatCannotJoinEndsTheOthersWait) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::thread failing([&] {
    std::this_thread::sleep_for(50ms);
    shm::give_up(*store, 1, "no memory left");
  });
  const std::string message = peer_error([&] { shm::Engine(*store, 0, 2, "g", 60s); });
  failing.join();
  EXPECT_THAT(message, AllOf(HasSubstr("joining group 'g'"), HasSubstr("rank 1 failed: no memory left")));
}

}  // namespace
}  // namespace isograd
