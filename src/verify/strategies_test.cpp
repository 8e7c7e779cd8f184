// Every strategy on the real model, at every number of ranks and precision, hybrid grids included: E1, E2 and
// E3.
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <atomic>
#include <thread>

#include "comm/shm/backend.hpp"
#include "full_tests.hpp"
#include "parallel/data/strategies_testing.hpp"
#include "planted.hpp"
#include "train/build.hpp"
#include "train/config.hpp"
#include "verify/test_problem.hpp"

namespace isograd {
namespace {

using verify_test::loader_of;
using verify_test::Small;
using verify_test::verify_on;

struct Case {
  int ranks;
  at::ScalarType dtype;
  std::int64_t packs_per_micro_batch;  // of 7 packs a step: all at once, or accumulated
};

void PrintTo(const Case& one, std::ostream* out) {
  *out << one.ranks << " ranks, " << c10::toString(one.dtype) << ", micro-batches of "
       << one.packs_per_micro_batch;
}

// Each number of ranks in one precision, with all packs at once or accumulated, by turns.
// ISOGRAD_FULL_TESTS=1: in both.
std::vector<Case> cases() {
  if (!full_tests())
    return {{1, at::kBFloat16, 100}, {2, at::kFloat, 100},    {3, at::kFloat, 1},
            {4, at::kBFloat16, 1},   {5, at::kBFloat16, 100}, {8, at::kFloat, 1}};
  std::vector<Case> all;
  for (int ranks : {1, 2, 3, 4, 5, 8})
    for (auto dtype : {at::kFloat, at::kBFloat16})
      for (std::int64_t packs : {100, 1}) all.push_back({ranks, dtype, packs});
  return all;
}

using MakeMesh = std::function<Mesh(const World& world, int replicas)>;

Mesh with_replicas(const World& world, int replicas) {
  return Mesh(world, data_grid(world.size, {.dp_replicate = replicas}));
}

// Every strategy with and without replicas, in place of the problem's own layout. `half`: of those without
// the first or the second half, by turns; ISOGRAD_FULL_TESTS=1: all.
enum class Half { kFirst, kSecond, kBoth };
void take_every_layout(VerifyProblem& problem, World& world, const Small& small,
                       const MakeMesh& mesh = with_replicas, Half half = Half::kBoth) {
  problem.layouts.clear();
  problem.make_model = [&small](at::ScalarType type) { return verify_test::model_in_units(small, type); };
  for (int replicas : {1, 2})
    if (world.size % replicas == 0)
      problem.layouts.push_back({fmt::format("zero3, {} replicas", replicas), nullptr,
                                 [&world, mesh, replicas](const VerifyModel& model, const Group&) {
                                   return fully_shard(model.units->root, model.named, model.units->blocks,
                                                      mesh(world, replicas));
                                 }});
  for (const testing::Strategy& strategy : testing::strategies())
    for (int replicas : {1, 2}) {
      if (world.size % replicas != 0 || (replicas > 1 && !strategy.sharded())) continue;
      problem.layouts.push_back({strategy.name + (replicas > 1 ? ", 2 replicas" : ""),
                                 [&world, mesh, strategy, replicas](auto parameters, const Group&) {
                                   return strategy.make(
                                       std::move(parameters), mesh(world, replicas),
                                       {.bucket_bytes = 16 << 10, .first_bucket_bytes = 4 << 10});
                                 }});
    }
  if (world.size > 1)
    problem.layouts.push_back({"overlapped", [&world, mesh](auto parameters, const Group&) {
                                 return bucketed(std::move(parameters), mesh(world, 1),
                                                 {.bucket_bytes = 1, .first_bucket_bytes = 0});
                               }});
  if (full_tests() || half == Half::kBoth) return;
  std::erase_if(problem.layouts, [place = std::size_t{0}, half](const LayoutUnderTest& layout) mutable {
    return !layout.name.ends_with("2 replicas") && takes_first(place++) != (half == Half::kFirst);
  });
}

class StrategiesVerified : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(All, StrategiesVerified, ::testing::ValuesIn(cases()));

TEST_P(StrategiesVerified, EqualOneProcess) {
  const auto& [ranks, dtype, packs] = GetParam();
  const Small small{.tied = ranks % 2 == 0, .packs_per_micro_batch = packs, .dtype = dtype};
  const Half half = ranks == 5 ? Half::kFirst : ranks == 8 ? Half::kSecond : Half::kBoth;
  const Verdict verdict = verify_on(ranks, small, [&](VerifyProblem& problem, World& world) {
    take_every_layout(problem, world, small, with_replicas, half);
  });
  EXPECT_TRUE(verdict.passed) << to_text(verdict, 100);
  for (const LayoutVerdict& layout : verdict.layouts) {
    EXPECT_EQ(layout.e1.state, Grade::State::kPassed) << layout.name;
    EXPECT_LE(layout.e1.error, 1e-10) << layout.name;
    EXPECT_EQ(layout.e2.state, Grade::State::kPassed) << layout.name;
    EXPECT_EQ(layout.e3.state, Grade::State::kPassed) << layout.name;
  }
}

// Ranks along an axis on which nothing is cut hold the same batch, and the mesh says so.
Mesh with_idle_axis(const World& world, int replicas) {
  return Mesh(world, Grid({{"dp_replicate", replicas}, {"dp_shard", world.size / 2 / replicas}, {"tp", 2}}));
}

TEST(OnAnIdleAxis, StrategiesEqualOneProcess) {
  for (const int ranks : full_tests() ? std::vector<int>{4, 8} : std::vector<int>{4}) {
    const Small small;
    const auto on_idle_axis = [&](VerifyProblem& problem, World& world) {
      const Mesh mesh = with_idle_axis(world, 1);
      problem.mesh = mesh;
      problem.local = loader_of(small, mesh.place(mesh.data()), mesh.size(mesh.data()))->next();
      take_every_layout(problem, world, small, with_idle_axis);
    };
    const Verdict verdict = verify_on(ranks, small, on_idle_axis);
    EXPECT_TRUE(verdict.passed) << to_text(verdict, 100);
    EXPECT_GE(verdict.layouts.size(), 10U);
    for (const LayoutVerdict& layout : verdict.layouts) EXPECT_LE(layout.e1.error, 1e-10) << layout.name;
    // B5: the same ranks as ones with data of their own.
    const Verdict counted = verify_on(ranks, small, [&](VerifyProblem& problem, World& world) {
      on_idle_axis(problem, world);
      problem.mesh.reset();
      problem.layouts = {verify_test::bucketed_layout()};
    });
    EXPECT_FALSE(counted.passed);
  }
}

// Groups in which every rank pauses at random at each phase of each operation: at its start, when the others
// can see it, when its work is done, when everybody's is.
class DelayedGroups {
 public:
  DelayedGroups(int ranks, std::uint64_t seed) : seed_(seed), made_(static_cast<std::size_t>(ranks)) {}

  Mesh operator()(const World& world, int replicas) {
    const std::string layout = fmt::format("layout {}", made_[static_cast<std::size_t>(world.rank)]++);
    return Mesh(group(layout, world, world.rank, world.size),
                data_grid(world.size, {.dp_replicate = replicas}),
                [this, layout, world](const std::vector<int>& ranks, const std::string& name) {
                  const auto place = std::find(ranks.begin(), ranks.end(), world.rank) - ranks.begin();
                  return group(fmt::format("{}, {}", layout, name), world, static_cast<int>(place),
                               static_cast<int>(ranks.size()));
                });
  }
  std::int64_t pauses() const { return pauses_; }

 private:
  Group group(const std::string& name, const World& world, int rank, int size) {
    if (size == 1) return Group::solo();
    const RandomKey key{
        .seed = seed_, .step = hash_name(name), .sample = static_cast<std::uint64_t>(world.rank)};
    shm::EngineOptions options;
    options.observer = [this, key, places = std::make_shared<std::uint64_t>(0)](shm::Phase,
                                                                                const shm::Task&) {
      const std::uint64_t bits = random_bits(key, (*places)++);
      if (bits % 16 != 0) return;
      std::this_thread::sleep_for(std::chrono::microseconds((bits >> 8) % 600));
      ++pauses_;
    };
    const auto timeout = std::chrono::seconds(60);
    return Group(c10::make_intrusive<ShmBackend>(store_, rank, size, name, timeout, options), name, timeout,
                 {.self_test = false});
  }

  std::uint64_t seed_;
  std::vector<int> made_;  // layouts, by rank
  c10::intrusive_ptr<c10d::Store> store_ = c10::make_intrusive<c10d::HashStore>();
  std::atomic<std::int64_t> pauses_ = 0;
};

// Races show when ranks are early or late: the same gradient, the same bits twice, the same updates. Each
// strategy on 3 ranks or on 4, replicas on 4. ISOGRAD_FULL_TESTS=1: on both, and on 2 ranks too, of which the
// replicas on 4 have groups.
class StrategiesDelayed : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, StrategiesDelayed,
                         ::testing::ValuesIn(full_tests() ? std::vector<int>{2, 3, 4}
                                                          : std::vector<int>{3, 4}));

TEST_P(StrategiesDelayed, EqualOneProcess) {
  const Small small{.packs_per_micro_batch = 1};
  const std::vector<std::uint64_t> seeds =
      full_tests() ? std::vector<std::uint64_t>{1, 2, 3} : std::vector<std::uint64_t>{1};
  for (const std::uint64_t seed : seeds) {
    DelayedGroups delayed(GetParam(), seed);
    const MakeMesh mesh = std::ref(delayed);
    const Verdict verdict = verify_on(GetParam(), small, [&](VerifyProblem& problem, World& world) {
      take_every_layout(problem, world, small, mesh, world.size == 3 ? Half::kFirst : Half::kSecond);
      problem.updates = 2;
      problem.optimizer = SgdOptions{.learning_rate = 0.05, .momentum = 0.9};
    });
    EXPECT_TRUE(verdict.passed) << "seed " << seed << "\n" << to_text(verdict, 100);
    for (const LayoutVerdict& layout : verdict.layouts) {
      EXPECT_EQ(layout.e1.state, Grade::State::kPassed) << layout.name;
      EXPECT_EQ(layout.e2.state, Grade::State::kPassed) << layout.name;
      EXPECT_EQ(layout.e3.state, Grade::State::kPassed) << layout.name;
    }
    std::printf("%d ranks, seed %d: %zu layouts, %lld pauses\n", GetParam(), static_cast<int>(seed),
                verdict.layouts.size(), static_cast<long long>(delayed.pauses()));
    EXPECT_GT(delayed.pauses(), 100 * static_cast<std::int64_t>(verdict.layouts.size()));
  }
}

#ifndef ISOGRAD_SANITIZE_THREAD  // the planted mistake is a data race, which the sanitizer reports as such
TEST_P(StrategiesDelayed, ABufferReusedInFlightIsSeen) {  // B17
  const Small small{.packs_per_micro_batch = 1};
  DelayedGroups delayed(GetParam(), 1);
  const Verdict verdict = verify_on(GetParam(), small, [&](VerifyProblem& problem, World& world) {
    problem.layouts = {{"reuses", [&](auto parameters, const Group&) {
                          return std::make_unique<planted::ReusesBuffersInFlight>(bucketed(
                              std::move(parameters), delayed(world, 1),
                              {.bucket_bytes = 16 << 10, .first_bucket_bytes = 4 << 10, .overlap = false}));
                        }}};
  });
  EXPECT_FALSE(verdict.passed);
}
#endif

}  // namespace
}  // namespace isograd
