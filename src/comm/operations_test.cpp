// Every operation of the backend as c10d calls it: even and uneven, staged in many chunks or in shared
// memory, messages of every size in any order of tags, futures.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "base/error_testing.hpp"
#include "comm/backend_testing.hpp"
#include "comm/shm/backend.hpp"
#include "full_tests.hpp"
#include "isograd/error.hpp"
#include "isograd/world.hpp"

namespace isograd {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Tensors = std::vector<at::Tensor>;

// Runs `body(backend, make)`; make(numel) gives a buffer of the kind that the case asks for. Chunks and
// memory by turns but on 3 ranks; ISOGRAD_FULL_TESTS=1: all.
template <typename Body>
void run_cases(Body&& body) {
  std::size_t place = 0;
  for (int size : {1, 2, 3, 5}) {
    for (const bool small : {true, false}) {
      for (const int shared : {0, 1, 2}) {
        if (!full_tests() && size != 3 && takes_first(place++)) continue;
        shm::EngineOptions options;
        if (small) options = {.chunk_bytes = 320, .chunks = 2, .ring_bytes = 128};
        SCOPED_TRACE(::testing::Message()
                     << size << " ranks, " << (small ? "small" : "default") << " chunks, shared memory on "
                     << (shared == 0   ? "none"
                         : shared == 1 ? "all"
                                       : "odd ranks"));
        auto store = c10::make_intrusive<c10d::HashStore>();
        run_ranks(size, [&](World& world) {
          auto backend = c10::make_intrusive<ShmBackend>(store, world.rank, size, "b", 30s, options);
          const auto make = [&](std::int64_t numel) {
            // Collective: ranks may need different amounts, so all use the same.
            const std::int64_t all = numel > 2000 ? 100'000 : 2000;
            at::Tensor memory = backend->empty_shared(all, at::kDouble).narrow(0, 0, numel);
            const bool here = shared == 1 || (shared == 2 && world.rank % 2 == 1);
            return here ? memory : at::zeros({numel}, at::kDouble);
          };
          body(*backend, make);
        });
      }
    }
  }
}

// The value from rank `rank` for rank `to` at `index`; distinct along all three.
double sent_value(int rank, int to, std::int64_t index) {
  return rank * 1e6 + to * 1e4 + static_cast<double>(index);
}

at::Tensor values(int rank, int to, std::int64_t count) {
  return at::arange(count, at::kDouble).add(sent_value(rank, to, 0));
}

TEST(Operations, OfC10dWithEveryNumber) {
  run_cases([](ShmBackend& backend, const auto& make) {
    isograd::testing::BackendCases cases{.types = {at::kDouble, at::kBFloat16, at::kLong, at::kBool}};
    const at::Tensor memory = make(100'000);
    if (backend.getSize() == 3) cases = {};
    cases.uneven = false;
    if (memory.numel() > 0) cases.memory = memory.view(at::kByte);
    const auto problems = isograd::testing::check_backend(backend, cases);
    for (std::size_t i = 0; i < problems.size() && i < 3; ++i) ADD_FAILURE() << problems[i];
    backend.barrier()->wait();  // the memory ends here
  });
}

TEST(Messages, OfEverySizeInBothDirections) {
  run_cases([](ShmBackend& backend, const auto& make) {
    const int rank = backend.getRank(), size = backend.getSize();
    for (std::int64_t count : {0, 1, 64, 65, 1000, 100'000}) {  // in the envelope, and through the ring
      std::vector<c10::intrusive_ptr<c10d::Work>> works;
      std::vector<Tensors> sent, received;
      for (int r = 0; r < size; ++r) {
        sent.push_back({make(count)});
        sent.back()[0].copy_(values(rank, r, count));
        received.push_back({make(count)});
      }
      for (int r = 0; r < size; ++r) {
        if (r != rank) works.push_back(backend.send(sent[static_cast<std::size_t>(r)], r, 0));
      }
      for (int r = 0; r < size; ++r) {
        if (r != rank) works.push_back(backend.recv(received[static_cast<std::size_t>(r)], r, 0));
      }
      for (auto it = works.rbegin(); it != works.rend(); ++it) (*it)->wait();
      for (int r = 0; r < size; ++r) {
        if (r == rank) continue;
        ASSERT_TRUE(at::equal(received[static_cast<std::size_t>(r)][0], values(r, rank, count)));
      }
      backend.barrier()->wait();  // their memory ends here
    }
  });
}

void run_pair(const std::function<void(ShmBackend&)>& body, int size = 2,
              std::chrono::milliseconds timeout = 30s) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  run_ranks(size, [&](World& world) {
    auto backend = c10::make_intrusive<ShmBackend>(store, world.rank, size, "pair", timeout);
    body(*backend);
  });
}

TEST(Messages, TagsAreServedInAnyOrderAndOneTagInItsOwn) {
  run_pair([](ShmBackend& backend) {
    for (std::int64_t count : {3, 70'000}) {
      std::vector<Tensors> tensors;
      std::vector<c10::intrusive_ptr<c10d::Work>> works;
      const bool sends = backend.getRank() == 0;
      for (int i = 0; i < 8; ++i) tensors.push_back({at::full({count}, sends ? i : -1, at::kDouble)});
      for (int i = 0; i < 8; ++i) {  // tags 0 1 0 1 ...; received: all of tag 1 first
        const std::size_t which = sends ? static_cast<std::size_t>(i)
                                        : static_cast<std::size_t>((i * 2 + 1) % 8 + (i >= 4 ? -1 : 0));
        works.push_back(sends ? backend.send(tensors[which], 1, i % 2)
                              : backend.recv(tensors[which], 0, which % 2));
      }
      for (auto& work : works) work->wait();
      for (int i = 0; i < 8; ++i)
        ASSERT_TRUE(tensors[static_cast<std::size_t>(i)][0].eq(i).all().item<bool>()) << i << " of " << count;
    }
  });
}

TEST(Messages, ManySmallOnesWaitForTheirReceiver) {  // more than there are envelopes
  run_pair([](ShmBackend& backend) {
    constexpr int kCount = 200;
    std::vector<Tensors> tensors;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (int i = 0; i < kCount; ++i) {
      tensors.push_back({at::full({2}, backend.getRank() == 0 ? i : -1)});
      works.push_back(backend.getRank() == 0 ? backend.send(tensors.back(), 1, 5)
                                             : backend.recv(tensors.back(), 0, 5));
    }
    for (auto& work : works) work->wait();
    for (int i = 0; i < kCount; ++i) ASSERT_EQ(tensors[static_cast<std::size_t>(i)][0][1].item<float>(), i);
  });
}

TEST(Messages, FromAnyRankTellWhoseTheyAre) {
  run_pair(
      [](ShmBackend& backend) {
        const int rank = backend.getRank();
        if (rank > 0) {
          Tensors mine{at::full({1000}, rank, at::kFloat)};
          backend.send(mine, 0, 3)->wait();
          return;
        }
        std::vector<int> seen;
        for (int i = 1; i < 4; ++i) {
          Tensors any{at::zeros({1000})};
          auto work = backend.recvAnysource(any, 3);
          work->wait();
          ASSERT_TRUE(any[0].eq(work->sourceRank()).all().item<bool>());
          seen.push_back(work->sourceRank());
        }
        EXPECT_THAT(seen, ::testing::UnorderedElementsAre(1, 2, 3));
      },
      4);
}

constexpr auto peer_error = [](auto&& action) { return error_testing::error_of<PeerError>(action); };

TEST(Messages, EndsThatDisagreeAreToldSo) {
  std::string receiver, sender;
  run_pair([&](ShmBackend& backend) {
    Tensors five{at::zeros({500})}, six{at::zeros({600})};
    if (backend.getRank() == 0) {
      sender = peer_error([&] {
        backend.send(six, 1, 9)->wait();
        backend.barrier()->wait();
      });
    } else {
      receiver = peer_error([&] { backend.recv(five, 0, 9)->wait(); });
    }
  });
  EXPECT_THAT(receiver, AllOf(HasSubstr("recv from rank 0 of 500 Float with tag 9"),
                              HasSubstr("send to rank 1 of 600 Float with tag 9")));
  EXPECT_THAT(sender, HasSubstr("rank 1 failed"));
}

TEST(Messages, LateEndIsNamed) {
  std::string message;
  run_pair(
      [&](ShmBackend& backend) {
        Tensors tensor{at::zeros({10})};
        if (backend.getRank() == 0) {
          message = peer_error([&] { backend.recv(tensor, 2, 0)->wait(); });
        } else {
          backend.setTimeout(30s);  // rank 0 shall time out first
          peer_error([&] { backend.barrier()->wait(); });
        }
      },
      3, 200ms);
  EXPECT_THAT(message, AllOf(HasSubstr("recv from rank 2"), HasSubstr("rank 2 (a thread of this process)"),
                             HasSubstr("200 ms")));
}

TEST(Operations, PartsThatDoNotMatchAreADisagreement) {
  std::string messages[2];
  run_pair([&](ShmBackend& backend) {
    const int rank = backend.getRank();
    at::Tensor input = at::zeros({4}), output = at::zeros({4 + rank});
    std::vector<std::int64_t> in{2, 2}, out{2, 2 + rank};
    if (rank == 1) out = {3, 2};  // rank 0 has 2 for it
    messages[rank] = peer_error([&] { backend.alltoall_base(output, input, out, in)->wait(); });
  });
  EXPECT_THAT(messages[1], HasSubstr("rank 0 has 8 bytes for rank 1, which expects 12"));
  EXPECT_THAT(messages[0], HasSubstr("rank 0 has 8 bytes for rank 1, which expects 12"));
}

TEST(Futures, CompleteWithoutAnyoneWaiting) {
  run_pair(
      [](ShmBackend& backend) {
        const int rank = backend.getRank();
        std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures;
        std::vector<Tensors> tensors;
        for (int i = 0; i < 10; ++i) {
          tensors.push_back({at::full({50'000}, rank + i)});
          futures.push_back(backend.allreduce(tensors.back())->getFuture());
        }
        for (int i = 0; i < 10; ++i) {
          futures[static_cast<std::size_t>(i)]->wait();  // this does not move the engine
          const auto result = futures[static_cast<std::size_t>(i)]->value().toTensorVector();
          ASSERT_EQ(result.size(), 1u);
          ASSERT_EQ(result[0][49'999].item<float>(), 3 + 3 * i);
        }
      },
      3);
}

TEST(Futures, CarryTheError) {
  run_pair([](ShmBackend& backend) {
    backend.barrier()->wait();
    if (backend.getRank() == 1) return;
    Tensors tensor{at::ones({10})};
    auto future = backend.allreduce(tensor)->getFuture();
    EXPECT_ANY_THROW(future->waitAndThrow());
    EXPECT_THAT(future->tryRetrieveErrorMessage(), HasSubstr("left the group"));
  });
}

TEST(History, NamesTheLastOperations) {
  run_pair([](ShmBackend& backend) {
    Tensors tensor{at::ones({10})};
    {
      const CallSiteScope here({"/somewhere/trainer.cpp", 77});
      for (int i = 0; i < 100; ++i) backend.allreduce(tensor)->wait();
    }
    backend.broadcast(tensor)->wait();
    const std::string history = backend.history();
    EXPECT_THAT(history, HasSubstr("#37 to #99 all_reduce(sum) of 10 Float at trainer.cpp:77"));
    EXPECT_THAT(history, HasSubstr("#100 broadcast from rank 0 of 10 Float"));
    EXPECT_THAT(history, ::testing::Not(HasSubstr("#36 ")));
    backend.barrier()->wait();
  });
}

}  // namespace
}  // namespace isograd
