#include "isograd/world.hpp"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "isograd/error.hpp"

namespace isograd {
namespace {

// Sums along any axes are those of a table of all ranks, and groups are made once.
TEST(Mesh, SumsAlongAxesAndViews) {
  const Grid grid = Grid({{"dp_shard", 2}, {"cp_ring", 2}, {"tp", 2}}, 8)
                        .viewed({"dp_shard", "cp_ring"}, {{"edp", 2}, {"ep", 2}});
  run_ranks(8, [&](World& world) {
    const Mesh mesh(world, grid);
    for (const AxisSet& along : {AxisSet{}, {"tp"}, {"cp_ring", "tp"}, {"dp_shard", "tp"}, {"ep"}, {"edp"}}) {
      double expected = 0;
      for (const int rank : grid.ranks_along(along, world.rank)) expected += 1 << rank;
      at::Tensor sum = at::full({1}, 1 << world.rank, at::kDouble);
      mesh.along(along).all_reduce(sum);
      EXPECT_EQ(sum.item<double>(), expected) << grid.text(along) << " of rank " << world.rank;
      EXPECT_EQ(mesh.along(along).rank(), mesh.place(along));
    }
    // A group is made once; another use gets another group.
    Group same = mesh.along({"tp"}), other = mesh.along({"tp"}, "attention");
    const auto barriers = [](const Group& group) { return group.traffic().operations.at("barrier").calls; };
    const auto before = barriers(same), before_other = barriers(other);
    mesh.along({"tp"}, "attention").barrier();
    EXPECT_EQ(barriers(same), before);
    EXPECT_EQ(barriers(other), before_other + 1);
    EXPECT_EQ(mesh.along({"dp_shard", "cp_ring", "tp"}).name(), world.group.name());
  });
}

// The mesh asks for groups that its caller makes, also for ranks along no axis.
TEST(Mesh, AsksForEachGroupOnce) {
  run_ranks(4, [&](World& world) {
    std::vector<std::vector<int>> asked;
    const Mesh mesh(world.group, Grid({{"pp", 4}}),
                    [&](const std::vector<int>& ranks, const std::string& name) {
                      asked.push_back(ranks);
                      return world.subgroup(ranks, name);
                    });
    if (world.rank != 1 && world.rank != 2) {
      for (int i = 0; i < 2; ++i) EXPECT_EQ(mesh.among({0, 3}, "both ends").size(), 2);
      EXPECT_EQ(mesh.among({0, 3}, "both ends").name(), "both ends");
      EXPECT_EQ(asked, (std::vector<std::vector<int>>{{0, 3}}));
    }
    EXPECT_EQ(mesh.along({"pp"}).name(), world.group.name());
    EXPECT_EQ(mesh.data(), AxisSet{});
    const Mesh plain(world.group);
    EXPECT_EQ(plain.along(plain.data()).size(), 4);
    EXPECT_EQ(plain.size({"dp_shard"}), 4);
    EXPECT_EQ(plain.size({"dp_replicate"}), 1);
  });
}

TEST(Mesh, RefusesAGridOfOtherRanks) {
  run_ranks(2, [](World& world) {
    try {
      Mesh(world, Grid({{"tp", 3}}, 3));
      ADD_FAILURE() << "no error";
    } catch (const ConfigError& error) {
      EXPECT_NE(std::string(error.what()).find("tp 3 for 2 ranks"), std::string::npos) << error.what();
    }
  });
}

}  // namespace
}  // namespace isograd
