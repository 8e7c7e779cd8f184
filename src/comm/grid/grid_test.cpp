#include "isograd/grid.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>

#include "base/error_testing.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

using error_testing::error_of;

void expect_in(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text << "\nlacks: " << part;
}

using Ranks = std::vector<int>;

TEST(Grid, NeighboursDifferAlongTheLastAxis) {
  const Grid grid({{"pp", 2}, {"dp_shard", 3}, {"tp", 2}}, 12);
  EXPECT_EQ(grid.ranks_along({"tp"}, 6), (Ranks{6, 7}));
  EXPECT_EQ(grid.ranks_along({"dp_shard"}, 9), (Ranks{7, 9, 11}));
  EXPECT_EQ(grid.ranks_along({"pp"}, 9), (Ranks{3, 9}));
  EXPECT_EQ(grid.ranks_along({"pp", "tp"}, 9), (Ranks{2, 3, 8, 9}));
  EXPECT_EQ(grid.ranks_along({}, 9), (Ranks{9}));
  EXPECT_EQ(grid.place({"dp_shard"}, 9), 1);
  EXPECT_EQ(grid.place({"pp", "tp"}, 9), 3);
  EXPECT_EQ(grid.size({"pp", "dp_shard"}), 6);
  EXPECT_EQ(grid.size({}), 1);
  EXPECT_EQ(grid.text(), "pp 2 x dp_shard 3 x tp 2");
}

TEST(Grid, AViewAssignsTheSameRanksToFactors) {
  // 2 x 4 ranks along dp_shard and cp_ring, tp inside: as 2 (edp) x 4 (ep), then as 4 x 2.
  const Grid grid({{"dp_shard", 2}, {"cp_ring", 4}, {"tp", 2}}, 16);
  const Grid wide = grid.viewed({"dp_shard", "cp_ring"}, {{"edp", 2}, {"ep", 4}});
  EXPECT_EQ(wide.ranks_along({"ep"}, 1), grid.ranks_along({"cp_ring"}, 1));
  const Grid narrow = grid.viewed({"dp_shard", "cp_ring"}, {{"edp", 4}, {"ep", 2}});
  EXPECT_EQ(narrow.ranks_along({"ep"}, 0), (Ranks{0, 2}));
  EXPECT_EQ(narrow.ranks_along({"edp"}, 0), (Ranks{0, 4, 8, 12}));
  EXPECT_EQ(narrow.ranks_along({"edp", "tp"}, 0), (Ranks{0, 1, 4, 5, 8, 9, 12, 13}));
  EXPECT_EQ(narrow.place({"ep"}, 6), 1);
  EXPECT_EQ(narrow.size({"edp", "ep", "tp"}), 16);
  EXPECT_EQ(narrow.complement({"ep"}), (AxisSet{"edp", "tp"}));
  EXPECT_EQ(narrow.complement({"tp"}), (AxisSet{"dp_shard", "cp_ring"}));
  EXPECT_EQ(narrow.axes_of("ep"), (AxisSet{"dp_shard", "cp_ring"}));
  EXPECT_EQ(narrow.axes_of("tp"), AxisSet{"tp"});
  EXPECT_EQ(data_axes(narrow), (AxisSet{"dp_shard", "cp_ring"}));
}

TEST(Grid, SomePlacesAlongAnAxisAreAskedForLikeOne) {
  const Grid grid({{"pp", 4}, {"dp_shard", 3}, {"tp", 2}}, 24);
  const std::string ends = axis_at("pp", {0, 3});
  EXPECT_EQ(ends, "pp[0,3]");
  EXPECT_TRUE(grid.has(ends));
  for (const char* none :
       {"pp[0,4]", "pp[3,0]", "pp[0,0]", "pp[]", "pp[0", "pp[0,]", "pp[-1]", "pp[ 0]", "xp[0]"})
    EXPECT_FALSE(grid.has(none)) << none;
  EXPECT_EQ(grid.ranks_along({ends}, 2), (Ranks{2, 20}));
  EXPECT_EQ(grid.ranks_along({ends, "tp"}, 20), (Ranks{2, 3, 20, 21}));
  EXPECT_EQ(grid.place({ends, "tp"}, 20), 2);
  EXPECT_EQ(grid.size({ends, "dp_shard"}), 6);
  EXPECT_EQ(grid.complement({ends}), (AxisSet{"dp_shard", "tp"}));
  EXPECT_EQ(grid.axes_of(ends), AxisSet{"pp"});
  EXPECT_EQ(grid.text({ends, "tp"}), "tp 2 x pp[0,3] 2");
  expect_in(error_of([&] { grid.size({ends, "pp"}); }), "without other names of its ranks");
  expect_in(error_of([&] { grid.size({ends, "pp[1]"}); }), "without other names of its ranks");
}

TEST(Grid, NamesWhatIsWrong) {
  const std::string product = error_of([] { Grid({{"dp_shard", 3}, {"tp", 2}}, 8); });
  expect_in(product, "dp_shard 3 x tp 2 for 8 ranks");
  expect_in(product, "dp_shard 4");
  expect_in(product, "take 6 ranks");
  expect_in(error_of([] { Grid({{"tp", 0}}, 1); }), "tp 0");
  expect_in(error_of([] { Grid({{"tp", 1 << 30}, {"pp", 1 << 30}, {"dp_shard", 16}}, 0); }), "for 0 ranks");
  expect_in(error_of([] {
              Grid(std::vector<Axis>{{"tp", 65536}, {"pp", 65536}});
            }),
            "at most 2147483647 ranks");
  expect_in(error_of([] { Grid({{"tp", 2}, {"tp", 2}}, 4); }), "'tp' twice");
  const Grid grid({{"dp_shard", 4}, {"tp", 2}}, 8);
  expect_in(error_of([&] { grid.size({"tensor"}); }), "one of dp_shard, tp");
  expect_in(error_of([&] { grid.viewed({"dp_shard"}, {{"edp", 3}, {"ep", 2}}); }), "ep");
  expect_in(error_of([&] { grid.viewed({"cp"}, {{"ep", 1}}); }), "'cp'");
  expect_in(error_of([&] { grid.viewed({"dp_shard"}, {{"edp", 2}, {"tp", 2}}); }), "'tp' again");
  const Grid viewed = grid.viewed({"dp_shard"}, {{"edp", 2}, {"ep", 2}});
  expect_in(error_of([&] { viewed.size({"dp_shard", "ep"}); }), "without other names of its ranks");
}

TEST(Grid, DataAxesLeaveTheRestToShards) {
  const Grid grid = data_grid(24, {.dp_replicate = 2, .cp_ring = 3, .cp_ulysses = 2});
  EXPECT_EQ(grid.text(), "dp_replicate 2 x dp_shard 2 x cp_ring 3 x cp_ulysses 2");
  EXPECT_EQ(grid.size(kSampleAxes), 4);
  EXPECT_EQ(grid.size(kContextAxes), 6);
  EXPECT_EQ(without(kDataAxes, kContextAxes), kSampleAxes);
  const std::string error = error_of([] { data_grid(8, {.cp_ring = 3}); });
  expect_in(error, "cp_ring 3");
  expect_in(error, "1, 2, 4, 8");
  expect_in(error_of([] { data_grid(8, {.dp_replicate = 0}); }), "sizes of 1 or more");
}

// For any grid, view and set of names: the groups along them partition the ranks, and a group and the groups
// across it share exactly one rank.
RC_GTEST_PROP(Grid, GroupsAlongAxesPartitionTheRanks, ()) {
  std::vector<Axis> axes;
  const int count = *rc::gen::inRange(1, 5);
  for (int i = 0; i < count; ++i) axes.push_back({"a" + std::to_string(i), *rc::gen::inRange(1, 4)});
  Grid grid(axes);
  AxisSet of;
  for (const Axis& axis : axes)
    if (*rc::gen::arbitrary<bool>()) of.insert(axis.name);
  const int viewed = grid.size(of);
  std::vector<int> divisors;
  for (int d = 1; d <= viewed; ++d)
    if (viewed % d == 0) divisors.push_back(d);
  const int inner = *rc::gen::elementOf(divisors);
  grid = grid.viewed(of, {{"outer", viewed / inner}, {"inner", inner}});

  const bool by_view = *rc::gen::arbitrary<bool>();
  AxisSet along, across = without(grid.names(), of);
  if (!by_view) across.insert(of.begin(), of.end());
  if (by_view) across.insert({"outer", "inner"});
  for (const auto& name : AxisSet(across))
    if (*rc::gen::arbitrary<bool>()) along.insert(name), across.erase(name);

  RC_ASSERT(grid.size(along) * grid.size(across) == grid.ranks());
  for (int rank = 0; rank < grid.ranks(); ++rank) {
    const auto group = grid.ranks_along(along, rank), other = grid.ranks_along(across, rank);
    RC_ASSERT(static_cast<int>(group.size()) == grid.size(along));
    RC_ASSERT(group.at(static_cast<std::size_t>(grid.place(along, rank))) == rank);
    for (const int member : group) RC_ASSERT(grid.ranks_along(along, member) == group);
    std::vector<int> common;
    std::set_intersection(group.begin(), group.end(), other.begin(), other.end(), std::back_inserter(common));
    RC_ASSERT(common == std::vector<int>{rank});
  }
}

// Groups at places contain exactly the axis's ranks at one of these places, for any other names.
RC_GTEST_PROP(Grid, GroupsAtPlacesAreThoseOfTheAxisThatLieThere, ()) {
  std::vector<Axis> axes;
  for (const char* name : {"a", "pp", "b"}) axes.push_back({name, *rc::gen::inRange(1, 5)});
  const Grid grid(axes);
  std::vector<int> places;
  for (int place = 0; place < grid.size({"pp"}); ++place)
    if (*rc::gen::arbitrary<bool>()) places.push_back(place);
  RC_PRE(!places.empty());
  AxisSet along{"pp"}, named{axis_at("pp", places)};
  if (*rc::gen::arbitrary<bool>()) along.insert("b"), named.insert("b");
  const auto at_places = [&](int rank) {
    return std::ranges::find(places, grid.place({"pp"}, rank)) != places.end();
  };
  for (int rank = 0; rank < grid.ranks(); ++rank) {
    if (!at_places(rank)) continue;
    std::vector<int> expected;
    for (const int other : grid.ranks_along(along, rank))
      if (at_places(other)) expected.push_back(other);
    RC_ASSERT(grid.ranks_along(named, rank) == expected);
    RC_ASSERT(static_cast<int>(expected.size()) == grid.size(named));
    RC_ASSERT(expected.at(static_cast<std::size_t>(grid.place(named, rank))) == rank);
  }
}

}  // namespace
}  // namespace isograd
