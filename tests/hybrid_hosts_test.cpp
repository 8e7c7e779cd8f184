// Axes combined over several hosts, as thread ranks say they are: shared memory within a host, messages
// between, whatever lies across.
#include <gtest/gtest.h>

#include "comm/hosts_testing.hpp"
#include "full_tests.hpp"
#include "hybrid_testing.hpp"

namespace isograd::hybrid {
namespace {

using isograd::testing::Garbles;
using isograd::testing::HostGroups;

// The meshes of a problem's model and of its layouts.
Planted over(const HostGroups& groups) {
  return {.meshes = [&groups](const std::shared_ptr<bool>&) -> MeshesOfProblem {
    const auto made = std::make_shared<std::map<std::string, Mesh>>();
    const MakeMesh make = [made, &groups](const World& world, const Grid& grid) {
      const auto known = made->find(grid.text());
      if (known != made->end()) return known->second;
      return made->emplace(grid.text(), groups.mesh(grid, world.rank, grid.text())).first->second;
    };
    return {.model = make, .layouts = make};
  }};
}

class HybridHosts : public HybridCells {
 protected:
  std::string wrong_on(const Cell& cell, const HostGroups& groups) {
    try {
      return wrong_with(measure(config_for(cell), cell.ranks(), wanted(cell), {.planted = over(groups)}));
    } catch (const std::exception& error) {
      return error.what();
    }
  }
};

const Cell& dense() {
  static const Cell cell =
      Cell{}.with(kPp, "2").with(kSchedule, "1f1b").with(kTp, "2").with(kShard, "2").with(kStrategy, "zero1");
  return cell;
}
const Cell& experts() {
  static const Cell cell = Cell{}
                               .with(kModel, "experts")
                               .with(kRing, "2")
                               .with(kTp, "2")
                               .with(kReplicate, "2")
                               .with(kEp, "2")
                               .with(kStrategy, "zero2");
  return cell;
}

// Stages across; tp, shards and context ranks across by turns; three hosts, and uneven ones. With
// ISOGRAD_FULL_TESTS=1 every cell of the pairwise sweep on two hosts, which need not have equally many ranks.
TEST_F(HybridHosts, CellsHaveOneProcesssGradientAndNorm) {
  struct Placed {
    Cell cell;
    std::vector<int> hosts;  // of each rank
  };
  const Cell units = Cell{}.with(kShard, "2").with(kTp, "2").with(kStrategy, "zero3");
  const Cell replicas = Cell{}.with(kReplicate, "3");
  std::vector<Placed> all = {{dense(), {0, 0, 0, 0, 1, 1, 1, 1}},
                             {experts(), {0, 1, 0, 1, 2, 2, 2, 1}},
                             {units, {0, 1, 0, 1}},
                             {replicas, {0, 1, 0}},
                             {replicas.with(kStrategy, "naive"), {0, 0, 1}}};
  if (full_tests()) {
    all.push_back({dense(), {0, 1, 0, 1, 0, 1, 0, 1}});
    all.push_back({experts(), {0, 0, 0, 1, 1, 1, 1, 1}});
    for (const Cell& cell : pairwise_cells()) {
      if (cell.ranks() == 1 || cell.is(kShare, "on")) continue;  // one copy lies in the memory of one host
      std::vector<int> hosts(static_cast<std::size_t>(cell.ranks()), 1);
      std::fill_n(hosts.begin(), cell.ranks() / 2, 0);  // also between ranks along tp
      all.push_back({cell, hosts});
    }
  }
  for (const Placed& placed : all)
    EXPECT_EQ(wrong_on(placed.cell, HostGroups(placed.hosts)), "") << placed.cell.name();
  std::printf("%zu cells on two or three hosts\n", all.size());
}

TEST_F(HybridHosts, AFaultBetweenHostsIsSeen) {
  HostGroups::Options garbled;
  garbled.self_test = false;  // which would refuse the groups
  garbled.wrapped = [](auto all) -> isograd::testing::Inner {
    const int from = all->getSize() / 2;  // the first rank that is on the other host
    return c10::make_intrusive<Garbles>(std::move(all), from);
  };
  EXPECT_NE(wrong_on(dense(), HostGroups({0, 0, 0, 0, 1, 1, 1, 1}, garbled)), "");
}

}  // namespace
}  // namespace isograd::hybrid
