// Unlikely orders of events in the shared-memory backend. Each rank's observer holds it at a phase until the
// others have reached the critical point.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "base/error_testing.hpp"
#include "comm/shm/backend.hpp"
#include "comm/shm/operation.hpp"
#include "isograd/error.hpp"
#include "isograd/world.hpp"

namespace isograd {
namespace {

using error_testing::error_of;
using namespace std::chrono_literals;
using shm::Kind;
using shm::Phase;
using shm::Task;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Tensors = std::vector<at::Tensor>;
using Observer = std::function<void(int rank, Phase, const Task&)>;

constexpr std::int64_t kLarge = 2000;  // fp32 numbers: too many for an envelope

void run_observed(int size, const Observer& observer, const std::function<void(ShmBackend&, int rank)>& body,
                  std::chrono::milliseconds timeout = 10s) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  run_ranks(size, [&](World& world) {
    shm::EngineOptions options{.print_history = false};
    if (observer) {
      options.observer = [&, rank = world.rank](Phase phase, const Task& task) {
        observer(rank, phase, task);
      };
    }
    auto backend = c10::make_intrusive<ShmBackend>(store, world.rank, size, "adverse", timeout, options);
    body(*backend, world.rank);
  });
}

// Waits for `flag`, with a limit so that no test hangs.
void await(const std::atomic<bool>& flag) {
  const auto deadline = std::chrono::steady_clock::now() + 10s;
  while (!flag) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline);
    std::this_thread::yield();
  }
}

// Rank 1 has a receive under way while it allocates. Rank 0 finishes first and sends what it got. Rank 1 must
// know the memory before anyone can name it.
TEST(Adversarial, MessageFromMemoryThatTheReceiverIsStillAllocating) {
  std::atomic<bool> announced = false, held = false, posted = false;
  run_observed(
      2,
      [&](int rank, Phase phase, const Task& task) {
        const shm::Fingerprint& print = task.fingerprint();
        const bool last_stage = print.kind == Kind::kAllocate && print.stage == 2;
        if (rank == 1 && last_stage && phase == Phase::kAnnounced) announced = true;
        if (rank == 0 && last_stage && phase == Phase::kStart) await(held);
        if (rank == 0 && print.kind == Kind::kSend && phase == Phase::kAnnounced) posted = true;
        if (rank == 1 && print.kind == Kind::kSend && phase == Phase::kStart) {  // with the engine's lock
          held = true;
          await(posted);
        }
      },
      [&](ShmBackend& backend, int rank) {
        Tensors data{at::zeros({kLarge})}, word{at::ones({1})};
        if (rank == 0) {
          at::Tensor shared = backend.empty_shared(kLarge, at::kFloat);
          shared.fill_(3);
          Tensors source{shared};
          auto send = backend.send(source, 1, 0);
          backend.recv(word, 1, 1)->wait();
          send->wait();
          return;
        }
        auto receive = backend.recv(data, 0, 0);
        std::thread other([&] {
          await(announced);
          backend.send(word, 0, 1)->wait();
        });
        const std::string error = error_of<std::exception>([&] { backend.empty_shared(kLarge, at::kFloat); });
        other.join();
        EXPECT_EQ(error, "no error");
        receive->wait();
        EXPECT_TRUE(data[0].eq(3).all().item<bool>());
      });
}

// A message that was refused once must not be delivered later, when the caller continues.
TEST(Adversarial, MismatchedReceiveIsNeverDelivered) {
  for (const bool shared : {false, true}) {
    run_observed(2, nullptr, [&](ShmBackend& backend, int rank) {
      // In shared memory the receiver would read beyond the sender's segment.
      const std::int64_t sent = shared ? 1000 : 2, expected = shared ? 1'000'000 : 3;
      at::Tensor memory = backend.empty_shared(1000, at::kFloat);
      Tensors data{rank == 0 ? (shared ? memory : at::ones({sent})) : at::full({expected}, -1.f)};
      if (rank == 0) {
        error_of<std::exception>([&] { backend.send(data, 1, 0)->wait(); });
        error_of<std::exception>([&] { backend.barrier()->wait(); });
        return;
      }
      EXPECT_THAT(error_of<std::exception>([&] { backend.recv(data, 0, 0)->wait(); }),
                  HasSubstr("the ranks disagreed"));
      for (int i = 0; i < 3; ++i) {
        EXPECT_THAT(error_of<std::exception>([&] { backend.barrier()->wait(); }),
                    HasSubstr("the ranks disagreed"));
      }
      EXPECT_TRUE(data[0].eq(-1).all().item<bool>());
    });
  }
}

// The reduction runs after the receive, because it uses its memory. A rank that waits for the reduction waits
// for the sender.
TEST(Adversarial, LostSenderHoldsUpACollective) {
  run_observed(2, nullptr, [&](ShmBackend& backend, int rank) {
    backend.barrier()->wait();
    if (rank == 1) return;  // leaves the group
    Tensors data{at::ones({10})};
    const auto begin = std::chrono::steady_clock::now();
    auto receive = backend.recv(data, 1, 0);
    EXPECT_THAT(error_of<std::exception>([&] { backend.allreduce(data)->wait(); }),
                HasSubstr("rank 1 (a thread of this"));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, 2s) << "not by the timeout";
  });
}

TEST(Adversarial, LateSenderThatHoldsUpACollectiveIsNamed) {
  std::atomic<bool> reported = false;
  run_observed(
      3, nullptr,
      [&](ShmBackend& backend, int rank) {
        Tensors data{at::ones({10})};
        if (rank != 0) return await(reported);
        auto receive = backend.recv(data, 2, 0);
        auto send = backend.send(data, 1, 0);
        EXPECT_THAT(error_of<std::exception>([&] { send->wait(); }),
                    AllOf(HasSubstr("rank 2 (a thread"), HasSubstr("did not arrive within 200 ms")));
        reported = true;
      },
      200ms);
}

// A receive from any rank takes messages that no earlier receive waits for.
TEST(Adversarial, ReceiveFromAnyRankPassesOneThatWaitsForAnother) {
  run_observed(
      3, nullptr,
      [&](ShmBackend& backend, int rank) {
        Tensors first{at::zeros({1})}, second{at::zeros({1})}, value{at::full({1}, float(rank))};
        if (rank == 2) backend.send(value, 0, 5)->wait();
        if (rank == 1) {
          backend.recv(first, 0, 6)->wait();
          backend.send(value, 0, 5)->wait();
          backend.send(value, 0, 5)->wait();
        }
        if (rank != 0) return;
        auto from_one = backend.recv(first, 1, 5);
        auto from_any = backend.recvAnysource(second, 5);
        from_any->wait();
        EXPECT_EQ(from_any->sourceRank(), 2);
        EXPECT_EQ(second[0].item<float>(), 2);
        backend.send(value, 1, 6)->wait();
        from_one->wait();
        EXPECT_EQ(first[0].item<float>(), 1);
        backend.recv(first, 1, 5)->wait();
      },
      2s);
}

// Small messages are buffered, so the receiver may ask for the last tag first, however many there are.
TEST(Adversarial, ManyMessagesInTheOppositeOrderOfTags) {
  constexpr int kMessages = 100;
  run_observed(
      2, nullptr,
      [&](ShmBackend& backend, int rank) {
        std::vector<Tensors> data;
        std::vector<c10::intrusive_ptr<c10d::Work>> works;
        for (int i = 0; i < kMessages; ++i) {
          const std::int64_t count = i == 90 ? kLarge : 1 + i % 3;
          data.push_back({rank == 0 ? at::full({count}, float(i)) : at::zeros({count})});
        }
        if (rank == 0) {  // pairs of the same tag, which keep their order
          for (int i = 0; i < kMessages; ++i) works.push_back(backend.send(data[i], 1, i / 2));
          for (auto& work : works) work->wait();
        } else {
          for (int tag = kMessages / 2; tag-- > 0;) {
            backend.recv(data[2 * tag], 0, tag)->wait();
            backend.recv(data[2 * tag + 1], 0, tag)->wait();
          }
        }
        for (int i = 0; i < kMessages; ++i) {
          EXPECT_TRUE(data[i][0].eq(float(i)).all().item<bool>()) << i;
        }
        backend.barrier()->wait();
      },
      3s);
}

// Only the parts of a list are in use, not the memory between them.
TEST(Adversarial, MemoryBetweenThePartsOfAListIsFree) {
  run_observed(
      2, nullptr,
      [&](ShmBackend& backend, int rank) {
        at::Tensor memory = at::ones({30});
        Tensors between{memory.narrow(0, 10, 10)}, output{at::zeros({10})};
        std::vector<Tensors> lists{{memory.narrow(0, 0, 10), memory.narrow(0, 20, 10)}};
        c10::intrusive_ptr<c10d::Work> receive;
        if (rank == 0) receive = backend.recv(between, 1, 0);
        backend.reduce_scatter(output, lists)->wait();
        EXPECT_TRUE(output[0].eq(2).all().item<bool>());
        if (rank == 1) backend.send(between, 0, 0)->wait();
        if (rank == 0) receive->wait();
      },
      2s);
}

// A rank reads its peers' parts while they write their results, so memory that is both is refused.
TEST(Adversarial, OutputsInWhatOthersReadAreRefused) {
  run_observed(2, nullptr, [&](ShmBackend& backend, int rank) {
    at::Tensor memory = at::ones({40});
    const int other = 1 - rank;
    const auto part = [&](int i, std::int64_t shift = 0) { return memory.narrow(0, 10 * i + shift, 10); };
    at::Tensor whole = memory.narrow(0, 0, 20), theirs = part(other), shifted = part(rank, 5);
    std::vector<Tensors> lists{{part(0), part(1)}};
    Tensors one{theirs}, inputs{part(0), part(1)}, outputs{part(1), part(2)};
    std::vector<std::int64_t> equal;
    const auto refused = HasSubstr("overlap");
    EXPECT_THAT(error_of<std::exception>([&] { backend._reduce_scatter_base(theirs, whole)->wait(); }),
                refused);
    EXPECT_THAT(error_of<std::exception>([&] { backend._reduce_scatter_base(shifted, whole)->wait(); }),
                refused);
    EXPECT_THAT(error_of<std::exception>([&] { backend.reduce_scatter(one, lists)->wait(); }), refused);
    EXPECT_THAT(error_of<std::exception>([&] { backend._allgather_base(whole, theirs)->wait(); }), refused);
    EXPECT_THAT(error_of<std::exception>([&] { backend.allgather(lists, one)->wait(); }), refused);
    EXPECT_THAT(error_of<std::exception>([&] { backend.alltoall_base(whole, whole, equal, equal)->wait(); }),
                refused);
    EXPECT_THAT(error_of<std::exception>([&] { backend.alltoall(outputs, inputs)->wait(); }), refused);
    // No other rank reads its own part of the whole.
    at::Tensor own = part(rank);
    backend._allgather_base(whole, own)->wait();
    backend._reduce_scatter_base(own, whole)->wait();
    EXPECT_TRUE(own.eq(2).all().item<bool>());
  });
}

// An unforeseen exception in the middle of an operation ends it for all ranks, wherever it is thrown.
TEST(Adversarial, UnforeseenExceptionReachesTheOthers) {
  for (const Phase where : {Phase::kStart, Phase::kAnnounced, Phase::kWorked}) {
    std::atomic<bool> reported = false;
    run_observed(
        2,
        [&](int rank, Phase phase, const Task& task) {
          if (rank == 1 && phase == where && task.fingerprint().kind == Kind::kAllReduce)
            throw std::bad_alloc();
        },
        [&](ShmBackend& backend, int rank) {
          Tensors data{at::ones({300'000})};
          const auto begin = std::chrono::steady_clock::now();
          const std::string error = error_of<std::exception>([&] { backend.allreduce(data)->wait(); });
          if (rank == 1)
            return await(reported);  // it does not leave, because the others would detect that too
          EXPECT_THAT(error, HasSubstr("rank 1 failed: std::bad_alloc"));
          EXPECT_LT(std::chrono::steady_clock::now() - begin, 5s);
          reported = true;
        });
  }
}

// A finished task is not run again because another one failed.
TEST(Adversarial, FinishedReceiveIsNotDeliveredTwice) {
  std::atomic<bool> receiving = false, sent = false, over = false;
  run_observed(
      2,
      [&](int rank, Phase phase, const Task& task) {
        if (rank == 1 && phase == Phase::kStart && task.fingerprint().kind == Kind::kAllReduce)
          throw std::runtime_error("planted");
      },
      [&](ShmBackend& backend, int rank) {
        Tensors data{at::ones({3})}, other{at::ones({3})};
        if (rank == 0) {
          await(receiving);
          backend.send(data, 1, 0)->wait();
          sent = true;
          return await(over);
        }
        auto receive = backend.recv(data, 0, 0);
        receiving = true;
        await(sent);
        data[0].fill_(0);
        EXPECT_THAT(error_of<std::exception>([&] { backend.allreduce(other)->wait(); }),
                    HasSubstr("planted"));
        receive->wait();
        EXPECT_TRUE(data[0].eq(1).all().item<bool>());
        data[0].fill_(7);
        error_of<std::exception>([&] { backend.barrier()->wait(); });
        EXPECT_TRUE(data[0].eq(7).all().item<bool>());
        over = true;
      });
}

TEST(Adversarial, VeryLongTimeoutsDoNotOverflow) {
  run_observed(
      2, nullptr,
      [&](ShmBackend& backend, int rank) {
        Tensors data{at::ones({3})};
        if (rank == 0) std::this_thread::sleep_for(300ms);  // long enough for the other to check the time
        EXPECT_EQ(error_of<std::exception>([&] { backend.allreduce(data)->wait(); }), "no error");
        EXPECT_EQ(error_of<std::exception>(
                      [&] { backend.allreduce(data)->wait(std::chrono::milliseconds::max()); }),
                  "no error");
      },
      std::chrono::milliseconds::max());
}

std::size_t open_descriptors() {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

TEST(Adversarial, GroupsAndMemoryLeaveNoDescriptors) {
  const auto round = [](int groups) {
    for (int i = 0; i < groups; ++i) {
      run_observed(3, nullptr, [&](ShmBackend& backend, int) {
        Tensors data{backend.empty_shared(100, at::kFloat)};
        backend.allreduce(data)->wait();
      });
    }
  };
  round(2);
  const std::size_t before = open_descriptors();
  round(100);
  EXPECT_EQ(open_descriptors(), before);
}

// Several threads of a rank wait for, poll and attach futures to the same work. The callbacks run once.
TEST(Adversarial, OneWorkInManyHands) {
  for (int round = 0; round < 20; ++round) {
    std::atomic<int> called = 0;
    run_observed(2, nullptr, [&](ShmBackend& backend, int rank) {
      std::vector<c10::intrusive_ptr<c10d::Work>> works;
      std::vector<Tensors> data;
      for (int i = 0; i < 100; ++i) {  // more operations than slots
        data.push_back({at::full({i % 7 == 0 ? 300'000 : 5}, float(rank + i))});
        works.push_back(backend.allreduce(data.back()));
      }
      std::vector<std::thread> threads;
      threads.emplace_back([&] {
        for (auto it = works.rbegin(); it != works.rend(); ++it) (*it)->wait();
      });
      threads.emplace_back([&] {
        for (auto& work : works) {
          while (!work->isCompleted()) std::this_thread::yield();
          EXPECT_TRUE(work->isSuccess());
        }
      });
      threads.emplace_back([&] {
        for (std::size_t i = 0; i < works.size(); i += 3)
          works[i]->getFuture()->addCallback([&](c10::ivalue::Future&) { ++called; });
      });
      for (auto& work : works) work->wait();
      for (auto& thread : threads) thread.join();
      for (int i = 0; i < 100; ++i) {
        EXPECT_TRUE(data[i][0].eq(float(2 * i + 1)).all().item<bool>());
      }
      backend.barrier()->wait();
    });
    EXPECT_EQ(called, 2 * 34);
  }
}

}  // namespace
}  // namespace isograd
