// HostsBackend on thread ranks that claim to be on several hosts.
#include "comm/hosts/backend.hpp"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <numeric>

#include "base/error_testing.hpp"
#include "comm/group_testing.hpp"
#include "comm/hosts_testing.hpp"
#include "isograd/error.hpp"

// LibTorch declares its Gloo backend only where Gloo's own headers are, which it does not ship.
namespace c10d {
class ProcessGroupGloo : public Backend {
 public:
  struct Options : Backend::Options {
    static c10::intrusive_ptr<Options> create_default(std::chrono::milliseconds timeout);
  };
  ProcessGroupGloo(const c10::intrusive_ptr<Store>& store, int rank, int size,
                   c10::intrusive_ptr<Options> options);
  ~ProcessGroupGloo() override;

 private:
  std::byte members_[8192];  // more than it has
};
}  // namespace c10d

namespace isograd {
namespace {

using namespace std::chrono_literals;
using isograd::testing::check_operations;
using isograd::testing::Garbles;
using isograd::testing::HostGroups;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Placing = std::vector<int>;  // the host of each rank

struct Rank {
  Group group;
  std::shared_ptr<HostsOfGroup> hosts;
  int rank, size;
};

void on_hosts(const Placing& placing, const std::function<void(Rank)>& body,
              const HostGroups::Options& options = {}) {
  const HostGroups groups(placing, options);
  run_ranks(groups.ranks(), [&](World& world) {
    auto [group, hosts] = groups.all(world.rank, "hosts");
    body({group, hosts, world.rank, world.size});
    world.group.barrier();  // memory that others read must live until they have read it
  });
}

// Even, one rank each, uneven, interleaved, and both; five and eight ranks; three hosts.
const std::vector<Placing> kPlacings = {{0, 1},
                                        {0, 0, 1, 1},
                                        {0, 1, 0, 1},
                                        {0, 0, 1},
                                        {0, 1, 1, 2, 2, 2},
                                        {0, 1, 0, 0, 1},
                                        {0, 0, 0, 1, 1, 1},
                                        {0, 0, 1, 2, 2, 1, 0, 2}};

std::string text(const Placing& placing) {
  std::string text;
  for (const int host : placing) text += static_cast<char>('a' + host);
  return text;
}

TEST(HostsBackend, EveryOperationOfEveryTypeAndSize) {
  for (const Placing& placing : kPlacings)
    on_hosts(placing, [&](const Rank& own) {
      const auto failures = check_operations(
          own.group,
          {.numels = {0, 1, 7, 301}, .dtypes = {at::kFloat, at::kBFloat16, at::kHalf, at::kLong, at::kBool}});
      for (std::size_t i = 0; i < failures.size() && i < 3; ++i)
        ADD_FAILURE() << text(placing) << ": " << failures[i];
    });
}

at::Tensor numbers(int rank, std::int64_t numel) {  // their float32 sums depend on the order
  return at::sin(at::arange(numel, at::kDouble).add(rank * 77.0))
      .mul(std::pow(10.0, rank % 3))
      .to(at::kFloat);
}

// In rank order within each host, hosts in the order of their first ranks.
at::Tensor summed_by_host(const Placing& placing, std::int64_t numel) {
  std::vector<int> order;
  for (const int host : placing)
    if (std::find(order.begin(), order.end(), host) == order.end()) order.push_back(host);
  at::Tensor total;
  for (const int host : order) {
    at::Tensor sum;
    for (int rank = 0; rank < static_cast<int>(placing.size()); ++rank)
      if (placing[static_cast<std::size_t>(rank)] == host)
        sum = sum.defined() ? sum + numbers(rank, numel) : numbers(rank, numel);
    total = total.defined() ? total + sum : sum;
  }
  return total;
}

TEST(HostsBackend, SumsInTheOrderThatItPromisesAndInSharedMemoryToo) {
  constexpr std::int64_t kNumel = 8 * 9 * 5 * 60;
  for (const Placing& placing : kPlacings) {
    const at::Tensor expected = summed_by_host(placing, kNumel);
    if (placing.size() > 4) {
      EXPECT_FALSE(at::equal(expected, summed_by_host(Placing(placing.size(), 0), kNumel)));
    }
    on_hosts(placing, [&](Rank own) {
      at::Tensor shared = own.group.empty_shared(kNumel, at::kFloat), plain = numbers(own.rank, kNumel);
      shared.copy_(plain);
      Pending first = own.group.all_reduce_async(shared);
      Pending second = own.group.all_reduce_async(plain);
      own.rank % 2 == 0 ? first.wait() : second.wait();  // in any order
      own.group.barrier();                               // while one of them is under way
      own.rank % 2 == 0 ? second.wait() : first.wait();
      EXPECT_TRUE(at::equal(shared, expected)) << text(placing);
      EXPECT_TRUE(at::equal(plain, expected)) << text(placing);
      if (kNumel % own.size != 0) return;
      const at::Tensor part = own.group.reduce_scatter(numbers(own.rank, kNumel));
      const std::int64_t rows = kNumel / own.size;
      EXPECT_TRUE(at::equal(part, expected.narrow(0, own.rank * rows, rows))) << text(placing);
      EXPECT_TRUE(at::equal(own.group.all_gather(part).view(-1), expected)) << text(placing);
    });
  }
}

// Many at once; stages of different operations overlap.
TEST(HostsBackend, ManyOperationsUnderWay) {
  for (const Placing& placing : {Placing{0, 0, 1, 1}, Placing{0, 1, 1, 2, 2, 2}})
    on_hosts(placing, [&](Rank own) {
      constexpr int kMany = 24;
      std::vector<at::Tensor> sums, gathered(kMany), mine(kMany);
      std::vector<Pending> pending;
      for (int i = 0; i < kMany; ++i) {
        sums.push_back(at::full({1 + 37 * i}, own.rank + i, at::kDouble));
        pending.push_back(own.group.all_reduce_async(sums.back()));
        const auto at = static_cast<std::size_t>(i);
        mine[at] = at::full({3}, 100 * i + own.rank, at::kLong);
        gathered[at] = at::zeros({own.size, 3}, at::kLong);
        pending.push_back(own.group.all_gather_async(gathered[at], mine[at]));
        if (i % 7 == own.rank % 3) pending[at].progress();
      }
      for (std::size_t i = 0; i < pending.size(); ++i)
        pending[own.rank % 2 == 0 ? i : pending.size() - 1 - i].wait();
      for (int i = 0; i < kMany; ++i) {
        const auto at = static_cast<std::size_t>(i);
        const double sum = own.size * (own.size - 1) / 2.0 + own.size * i;
        EXPECT_TRUE(at::equal(sums[at], at::full_like(sums[at], sum)));
        for (int rank = 0; rank < own.size; ++rank)
          EXPECT_TRUE(at::equal(gathered[at][rank], at::full({3}, 100 * i + rank, at::kLong)));
      }
    });
}

// A rank on each host sends only what the others lack. Over H hosts, for a buffer of n bytes, that is 2(H -
// 1)n for an all-reduce, and (H - 1)n for a reduce-scatter or for a gather of n bytes.
TEST(HostsBackend, BytesAcrossHostsAreTheFewest) {
  constexpr std::int64_t kNumel = 8 * 9 * 5;
  for (const Placing& placing : kPlacings) {
    const std::int64_t others = *std::max_element(placing.begin(), placing.end()), bytes = kNumel * 8;
    std::mutex mutex;
    std::map<std::string, std::int64_t> sent;
    on_hosts(placing, [&](Rank own) {
      std::int64_t before = own.hosts->across();
      const auto count = [&](const std::string& what) {
        const std::lock_guard lock(mutex);
        sent[what] += own.hosts->across() - before;
        before = own.hosts->across();
      };
      const at::Tensor whole = at::ones({kNumel}, at::kDouble);
      own.group.all_reduce(whole);
      count("all_reduce");
      const std::int64_t rows = kNumel / own.size * own.size;
      const at::Tensor part = own.group.reduce_scatter(whole.narrow(0, 0, rows));
      count("reduce_scatter");
      own.group.all_gather(part);
      count("all_gather");
    });
    const std::int64_t even =
        kNumel / static_cast<std::int64_t>(placing.size()) * static_cast<std::int64_t>(placing.size()) * 8;
    EXPECT_EQ(sent["all_reduce"], 2 * others * bytes) << text(placing);
    EXPECT_EQ(sent["reduce_scatter"], others * even) << text(placing);
    EXPECT_EQ(sent["all_gather"], others * even) << text(placing);
  }
}

TEST(HostsBackend, PlantedFaultBetweenHostsIsFoundAtTheStart) {
  HostGroups::Options garbled;
  garbled.wrapped = [](auto all) { return c10::make_intrusive<Garbles>(std::move(all), 2); };
  EXPECT_THAT(error_testing::error_of<PeerError>([&] {
                on_hosts(
                    {0, 0, 1, 1}, [](const Rank&) {}, garbled);
              }),
              HasSubstr("all_reduce"));
}

// The carrier between hosts is any backend. Gloo completes a message only while somebody waits for it.
TEST(HostsBackend, GlooCarriesBetweenHostsTheSameBits) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  static auto* kept = new std::vector<isograd::testing::Inner>;  // LibTorch alone knows their size to free
  static std::mutex mutex;
  HostGroups::Options over_gloo;
  over_gloo.wrapped = [&](const auto& all) -> isograd::testing::Inner {
    auto gloo = c10::make_intrusive<c10d::ProcessGroupGloo>(
        store, all->getRank(), all->getSize(), c10d::ProcessGroupGloo::Options::create_default(60s));
    const std::lock_guard lock(mutex);
    return kept->emplace_back(std::move(gloo));
  };
  const Placing placing{0, 0, 1, 1, 1};
  const at::Tensor expected = summed_by_host(placing, 3000);
  on_hosts(
      placing,
      [&](Rank own) {
        const at::Tensor sum = numbers(own.rank, 3000);
        own.group.all_reduce(sum);
        EXPECT_TRUE(at::equal(sum, expected));
        const at::Tensor part = own.group.reduce_scatter(numbers(own.rank, 3000));
        EXPECT_TRUE(at::equal(part, expected.narrow(0, own.rank * 600, 600)));
        EXPECT_TRUE(at::equal(own.group.all_gather(part).view(-1), expected));
        at::Tensor message = at::full({3}, own.rank), received = at::empty_like(message);
        Pending receive = own.group.recv_async(received, (own.rank + 4) % 5, 7);
        own.group.send(message, (own.rank + 1) % 5, 7);
        receive.wait();
        EXPECT_EQ(received[2].item<int>(), (own.rank + 4) % 5);
        EXPECT_THAT(error_testing::error_of([&] { own.group.send(message, own.rank == 0 ? 1 : 0, 32760); }),
                    HasSubstr("(shm+gloo)"));
      },
      over_gloo);
}

// Whether the group's wait is over first or that of the backend between hosts, which knows ranks alone.
TEST(HostsBackend, TimeoutNamesTheHostThatDoesNotCome) {
  for (const auto between_hosts : {60000ms, 100ms}) {
    std::mutex mutex;
    std::map<int, std::string> said;
    HostGroups::Options short_wait;
    short_wait.timeout = 400ms, short_wait.self_test = false;
    short_wait.wrapped = [&](isograd::testing::Inner all) {
      all->setTimeout(between_hosts);
      return all;
    };
    on_hosts(
        {0, 0, 1, 1, 2},
        [&](Rank own) {
          if (own.rank == 2 || own.rank == 3) return;
          for (int i = 0; i < 2; ++i) try {
              own.group.all_reduce(at::ones({64}));
              ADD_FAILURE() << "no error";
            } catch (const PeerError& error) {
              const std::lock_guard lock(mutex);
              said[own.rank] += error.what();
            }
        },
        short_wait);
    // Either may time out first. The other gets its error.
    const std::string both = said[0] + said[4];
    EXPECT_THAT(both, HasSubstr("all_reduce #0 of group 'hosts' (shm+shm) on rank "));
    if (between_hosts < 400ms)
      EXPECT_THAT(both, AllOf(HasSubstr("nothing from host b (rank 2): rank 2"),
                              HasSubstr("did not arrive within 100 ms")));
    else
      EXPECT_THAT(both, HasSubstr("nothing from host b (rank 2) within 400 ms"));
    // It waits only for rank 0 of its own host and gets that rank's error.
    EXPECT_THAT(said[1], HasSubstr("found rank 0 failed"));
    for (const int rank : {0, 1, 4}) EXPECT_THAT(said[rank], HasSubstr("failed earlier"));
  }
}

TEST(HostsBackend, BadInputIsRefused) {
  on_hosts({0, 0, 1, 1}, [](Rank own) {
    const auto said = [](auto&& call) { return error_testing::error_of(call); };
    EXPECT_THAT(said([&] { own.group.send(at::ones({1}), (own.rank + 1) % 4, 32760); }),
                HasSubstr("0 to 32759"));
    EXPECT_THAT(said([&] { own.group.host_shared(5, at::kFloat); }), HasSubstr("shm+shm"));
    EXPECT_THAT(said([&] { own.group.all_reduce(at::ones({1}), ReduceOp::kAverage); }), HasSubstr("sum"));
    EXPECT_THAT(said([&] { own.group.all_reduce(at::ones({2}, at::kComplexFloat)); }), HasSubstr("Complex"));
  });
}

TEST(HostsBackend, RankThatFailsTellsThoseOfItsHostAtOnce) {
  HostGroups::Options untested;
  untested.self_test = false;
  std::map<int, std::string> said;
  on_hosts(
      {0, 0, 1},
      [&](Rank own) {
        if (own.rank == 0) return own.group.poison("rank 0's disk is full");
        if (own.rank == 2) return;
        try {
          own.group.all_reduce(at::ones({64}));
        } catch (const PeerError& error) {
          said[own.rank] = error.what();
        }
      },
      untested);
  EXPECT_THAT(said[1], HasSubstr("disk is full"));
}

}  // namespace
}  // namespace isograd
