// Steps on several hosts, as thread ranks say they are: the gradient of one process, whatever lies across.
#include <gtest/gtest.h>

#include "comm/hosts_testing.hpp"
#include "full_tests.hpp"
#include "isograd/fully_shard.hpp"
#include "train/build.hpp"
#include "train/config.hpp"
#include "verify/test_problem.hpp"

namespace isograd {
namespace {

using isograd::testing::Garbles;
using isograd::testing::HostGroups;
using verify_test::loader_of;
using verify_test::Small;
using verify_test::verify_on;

struct Placed {
  std::vector<int> hosts;  // of each rank
  int replicas, tp;        // the other ranks of a copy of the model lie along dp_shard
};

Grid grid_of(const Placed& placed) {
  const int ranks = static_cast<int>(placed.hosts.size());
  return Grid({{"dp_replicate", placed.replicas},
               {"dp_shard", ranks / placed.replicas / placed.tp},
               {"tp", placed.tp}});
}

// A strategy of each kind, each with groups of its own.
Verdict verify_over(const Placed& placed, const HostGroups& groups) {
  const Small small{.packs_per_micro_batch = 2};
  return verify_on(groups.ranks(), small, [&](VerifyProblem& problem, World& world) {
    problem.mesh = groups.mesh(grid_of(placed), world.rank, "data");
    problem.local =
        loader_of(small, problem.mesh->place(problem.mesh->data()), problem.mesh->size(problem.mesh->data()))
            ->next();
    problem.make_model = [small](at::ScalarType type) { return verify_test::model_in_units(small, type); };
    problem.updates = 2;
    problem.experiments = false;
    problem.layouts.clear();
    const auto mesh = [&, made = std::make_shared<int>(0)](const std::string& name) {
      return groups.mesh(grid_of(placed), world.rank, fmt::format("{} {}", name, (*made)++));
    };
    const DataParallelOptions buckets{.bucket_bytes = 16 << 10, .first_bucket_bytes = 4 << 10};
    problem.layouts.push_back({"bucketed", [=](auto parameters, const Group&) {
                                 return bucketed(std::move(parameters), mesh("bucketed"), buckets);
                               }});
    problem.layouts.push_back({"naive", [=](auto parameters, const Group&) {
                                 return naive(std::move(parameters), mesh("naive"));
                               }});
    problem.layouts.push_back({"zero3", nullptr, [=](const VerifyModel& model, const Group&) {
                                 return fully_shard(model.units->root, model.named, model.units->blocks,
                                                    mesh("zero3"));
                               }});
  });
}

// Replicas across and shards within; shards across; a tp across; three hosts; uneven and interleaved ones.
TEST(OnSeveralHosts, StepsEqualOneProcess) {
  std::vector<Placed> all = {{{0, 0, 1, 1}, 2, 1}, {{0, 1, 0, 1}, 2, 2}, {{0, 0, 0, 1, 1}, 1, 1}};
  const std::vector<Placed> more = {
      {{0, 0, 1, 1}, 2, 2}, {{0, 0, 0, 1, 1, 1}, 1, 1}, {{0, 1, 2, 2, 2, 2, 1, 1}, 2, 1}};
  if (full_tests()) all.insert(all.end(), more.begin(), more.end());
  for (const Placed& placed : all) {
    const Verdict verdict = verify_over(placed, HostGroups(placed.hosts));
    EXPECT_TRUE(verdict.passed) << grid_of(placed).text() << "\n" << to_text(verdict, 100);
    for (const LayoutVerdict& layout : verdict.layouts) {
      EXPECT_LE(layout.e1.error, 1e-10) << layout.name;
      EXPECT_EQ(layout.e2.state, Grade::State::kPassed) << layout.name;
      EXPECT_EQ(layout.e3.state, Grade::State::kPassed) << layout.name;
    }
  }
}

TEST(OnSeveralHosts, AFaultBetweenHostsIsSeen) {
  HostGroups::Options garbled;
  garbled.self_test = false;  // which would refuse the groups
  garbled.wrapped = [](auto all) -> testing::Inner {
    const int from = all->getSize() == 4 ? 2 : 1;  // the first rank that is on the other host
    return c10::make_intrusive<Garbles>(std::move(all), from);
  };
  const Verdict verdict = verify_over({{0, 0, 1, 1}, 2, 1}, HostGroups({0, 0, 1, 1}, garbled));
  EXPECT_FALSE(verdict.passed);
  for (const LayoutVerdict& layout : verdict.layouts)
    EXPECT_EQ(layout.e1.state, Grade::State::kFailed) << layout.name;
}

}  // namespace
}  // namespace isograd
