#include "isograd/parameters.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>

#include "base/error_testing.hpp"

namespace isograd {
namespace {

using Sizes = std::vector<std::int64_t>;

const Grid kGrid = Grid({{"pp", 3}, {"dp_shard", 2}, {"cp_ring", 2}, {"tp", 2}})
                       .viewed({"dp_shard", "cp_ring"}, {{"edp", 2}, {"ep", 2}});

// Expects an error with these parts; none: the placement is accepted.
void expect_says(const Placement& placement, const std::vector<std::string>& parts) {
  const std::string text = error_testing::error_of([&] { check_placement("w", placement, kGrid); });
  if (parts.empty()) EXPECT_EQ(text, "no error");
  for (const std::string& part : parts)
    EXPECT_NE(text.find(part), std::string::npos) << text << "\nlacks: " << part;
}

std::int64_t product(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
}

// The place in the whole tensor of each of a rank's local elements, in their order.
Sizes places(const Placement& placement, const Grid& grid, int rank) {
  const Sizes local = local_shape(placement, grid, rank);
  Sizes result(static_cast<std::size_t>(product(local)), -1);
  const auto index = [](const Sizes& shape, const Sizes& begin, const Sizes& at) {
    std::int64_t flat = 0;
    for (std::size_t dim = 0; dim < shape.size(); ++dim) flat = flat * shape[dim] + begin[dim] + at[dim];
    return flat;
  };
  for (const Slice& slice : slices(placement, grid, rank)) {
    Sizes at(slice.sizes.size(), 0);
    for (std::int64_t count = product(slice.sizes); count > 0; --count) {
      result.at(static_cast<std::size_t>(index(local, slice.local, at))) =
          index(placement.whole_shape, slice.whole, at);
      for (std::size_t dim = at.size(); dim-- > 0;) {
        if (++at[dim] < slice.sizes[dim]) break;
        at[dim] = 0;
      }
    }
  }
  return result;
}

TEST(Placement, SaysWhatEachRankHolds) {
  // A fused qkv of 4 query, 2 key and 2 value rows, held by the first and the last stage.
  const Placement fused = placed(kGrid, {8, 3}, {even_cut(kGrid, "tp", 0, {4, 2, 2})}, {0, 2}, {"pp"});
  check_placement("w", fused, kGrid);
  EXPECT_EQ(local_shape(fused, kGrid, 1), (Sizes{4, 3}));
  EXPECT_EQ(local_shape(fused, kGrid, 8), Sizes{0});  // the second stage
  const auto second = slices(fused, kGrid, 1);
  ASSERT_EQ(second.size(), 3u);
  EXPECT_EQ(second[1].whole, (Sizes{5, 0}));
  EXPECT_EQ(second[1].local, (Sizes{2, 0}));
  EXPECT_EQ(second[1].sizes, (Sizes{1, 3}));
  EXPECT_EQ(copies(fused, kGrid), (AxisSet{"pp[0,2]", "dp_shard", "cp_ring"}));
  EXPECT_EQ(sync_axes(fused, kGrid).summed, copies(fused, kGrid));
  EXPECT_EQ(sync_axes(placed(kGrid, {8, 3}, {}, {0, 1, 2}, {"pp"}), kGrid).summed,
            (AxisSet{"pp", "dp_shard", "cp_ring"}));
  EXPECT_EQ(holders_along(fused, kGrid, {"pp"}, 1), (std::vector<int>{1, 17}));

  // Experts: cut along ep, summed over the rest of its axes.
  const Placement expert = placed(kGrid, {5, 2}, {even_cut(kGrid, "ep", 0, {5})}, {1});
  check_placement("w", expert, kGrid);
  EXPECT_EQ(expert.summed, AxisSet{"edp"});
  EXPECT_EQ(copies(expert, kGrid), (AxisSet{"edp", "tp"}));
  EXPECT_EQ(local_shape(expert, kGrid, 8), (Sizes{3, 2}));
  EXPECT_EQ(local_shape(expert, kGrid, 10), (Sizes{2, 2}));
  EXPECT_EQ(owned_part(expert, kGrid, 0).size(), 0);

  const Placement number = placed(kGrid, {});
  EXPECT_EQ(local_shape(number, kGrid, 5), Sizes{});
  EXPECT_EQ(slices(number, kGrid, 5).size(), 1u);
  EXPECT_EQ(owned_part(number, kGrid, 0).size(), 1);
  EXPECT_EQ(owned_part(number, kGrid, 1).size(), 0);
}

TEST(Placement, RefusesByParameterAndAxis) {
  const Cut tp = even_cut(kGrid, "tp", 0, {6}), ep = even_cut(kGrid, "ep", 0, {6});
  const auto with = [](std::vector<Cut> cuts, AxisSet summed = {}, std::vector<int> stages = {}) {
    return Placement{.whole_shape = {6, 4},
                     .cuts = std::move(cuts),
                     .stages = std::move(stages),
                     .summed = std::move(summed)};
  };
  const auto rows = [](std::vector<Sizes> counts) {
    return Cut{.axis = "tp", .dim = 0, .blocks = {6}, .rows = std::move(counts)};
  };
  expect_says(with({tp}, {"dp_shard"}), {});
  expect_says(with({tp, ep}), {"parameter 'w' along axis 'ep'", "dimension 0 cut along 'tp' too"});
  expect_says(with({rows({{4, 3}})}), {"'w' along axis 'tp'", "7 rows", "6 in all", "no more"});
  expect_says(with({rows({{4, 1}})}), {"5 rows", "no fewer"});
  expect_says(with({rows({{7, -1}})}), {"7, -1", "0 or more"});
  expect_says(with({rows({{6}})}), {"1 ranks", "each of 2 ranks"});
  expect_says(with({rows({})}), {"rows for 0 blocks"});
  expect_says(with({even_cut(kGrid, "tp", 0, {3, 2})}), {"blocks of 3, 2", "the 6 rows of dimension 0"});
  expect_says(with({even_cut(kGrid, "tp", 2, {6})}), {"dimension 2", "2 dimensions of 6 x 4"});
  expect_says(with({tp}, {"tp"}), {"'w' along axis 'tp'", "sum along the axis on which it is cut"});
  expect_says(with({ep}, {"dp_shard"}), {"along axis 'dp_shard'", "no copies", "edp, pp, tp"});
  expect_says(with({}, {"pp"}, {1}), {"along axis 'pp'", "no copies"});
  expect_says(with({}, {"tensor"}), {"'w' along axis 'tensor'", "dp_shard"});
  expect_says(with({{.axis = "tensor", .dim = 0, .blocks = {6}, .rows = {{6}}}}),
              {"a cut along 'tensor'", "tp"});
  expect_says(with({tp, even_cut(kGrid, "tp", 1, {4})}), {"'tp'", "two cuts along this axis"});
  expect_says(with({ep, even_cut(kGrid, "dp_shard", 1, {4})}), {"'dp_shard'", "other names of its ranks"});
  expect_says(with({even_cut(kGrid, "pp", 0, {6})}, {}, {1}), {"'pp'", "in addition to stages"});
  for (const std::vector<int>& stages : {std::vector<int>{3}, {1, 1}, {2, 0}, {-1}})
    expect_says(with({}, {}, stages), {"'w' along axis 'pp'", "0 to 2"});
  expect_says({.whole_shape = {-1}}, {"'w'", "0 or more"});
}

// A placement on a random grid, with views, uneven and empty cuts, several blocks, stages and sums.
struct Drawn {
  Grid grid;
  Placement placement;
};

Drawn draw() {
  std::vector<Axis> axes;
  for (const char* name : {"pp", "dp_replicate", "dp_shard", "cp_ring", "tp"})
    axes.push_back({name, *rc::gen::weightedElement<int>({{3, 1}, {4, 2}, {1, 3}})});
  Grid grid(axes);
  std::vector<std::string> to_cut{"tp"};
  const auto view = [&](const AxisSet& of, const std::string& outer, const std::string& inner) {
    std::vector<int> divisors;
    for (int d = 1; d <= grid.size(of); ++d)
      if (grid.size(of) % d == 0) divisors.push_back(d);
    const int size = *rc::gen::elementOf(divisors);
    grid = grid.viewed(of, {{outer, grid.size(of) / size}, {inner, size}});
  };
  if (*rc::gen::arbitrary<bool>()) {
    view({"dp_shard", "cp_ring"}, "edp", "ep");
    to_cut.push_back("ep");
  } else {
    to_cut.push_back("dp_shard");
  }
  if (*rc::gen::arbitrary<bool>()) {
    view({"tp"}, "tp_heads", "tp_copies");
    to_cut[0] = "tp_heads";
  }
  Placement placement;
  const int dims = *rc::gen::inRange(0, 4);
  std::vector<Cut> cuts;
  for (int dim = 0; dim < dims; ++dim) {
    if (to_cut.empty() || *rc::gen::arbitrary<bool>()) {
      placement.whole_shape.push_back(*rc::gen::inRange(0, 9));
      continue;
    }
    Cut cut{.axis = to_cut.back(), .dim = dim, .blocks = {}, .rows = {}};
    to_cut.pop_back();
    for (int blocks = *rc::gen::inRange(1, 4); blocks > 0; --blocks) {
      auto& rows = cut.rows.emplace_back();
      for (int place = 0; place < grid.size({cut.axis}); ++place) rows.push_back(*rc::gen::inRange(0, 5));
      cut.blocks.push_back(std::accumulate(rows.begin(), rows.end(), std::int64_t{0}));
    }
    placement.whole_shape.push_back(std::accumulate(cut.blocks.begin(), cut.blocks.end(), std::int64_t{0}));
    cuts.push_back(std::move(cut));
  }
  for (int stage = 0; stage < grid.size({"pp"}); ++stage)
    if (*rc::gen::arbitrary<bool>()) placement.stages.push_back(stage);
  placement = placed(grid, placement.whole_shape, cuts, placement.stages);
  for (const std::string& axis : AxisSet(copies(placement, grid)))
    if (*rc::gen::arbitrary<bool>())
      placement.summed.insert(axis);
    else
      placement.summed.erase(axis);
  return {grid, placement};
}

RC_GTEST_PROP(Placement, EveryElementHasOneOwnerAndTheWholeAssembles, ()) {
  const auto [grid, placement] = draw();
  check_placement("w", placement, grid);
  const auto numel = static_cast<std::size_t>(product(placement.whole_shape));
  std::vector<int> owners(numel, 0), holders(numel, 0);
  for (int rank = 0; rank < grid.ranks(); ++rank) {
    const Sizes mine = places(placement, grid, rank);
    for (const std::int64_t place : mine) {
      RC_ASSERT(place >= 0);  // slices fill the local tensor
      ++holders[static_cast<std::size_t>(place)];
    }
    RC_ASSERT(std::is_sorted(mine.begin(), mine.end()));
    RC_ASSERT(std::adjacent_find(mine.begin(), mine.end()) == mine.end());
    const Range owned = owned_part(placement, grid, rank);
    RC_ASSERT(owned.begin >= 0 && owned.begin <= owned.end &&
              owned.end <= static_cast<std::int64_t>(mine.size()));
    for (std::int64_t i = owned.begin; i < owned.end; ++i)
      ++owners[static_cast<std::size_t>(mine[static_cast<std::size_t>(i)])];
  }
  RC_ASSERT(std::all_of(owners.begin(), owners.end(), [](int count) { return count == 1; }));
  // As many ranks hold an element as there are copies.
  for (int rank = 0; rank < grid.ranks(); ++rank)
    if (holds(placement, grid, rank)) {
      const auto held = holders_along(placement, grid, copies(placement, grid), rank);
      for (const std::int64_t place : places(placement, grid, rank))
        RC_ASSERT(holders[static_cast<std::size_t>(place)] == static_cast<int>(held.size()));
      for (const int other : held) RC_ASSERT(places(placement, grid, other) == places(placement, grid, rank));
    }
}

// Parts that differ along the summed axes, and nowhere else, add up to the whole gradient's slice on each
// rank, and owned squares of that to the square of its norm.
RC_GTEST_PROP(Placement, SumsAndOwnedSquaresAreThoseOfTheWhole, ()) {
  const auto [grid, placement] = draw();
  const auto part = [](std::int64_t place, int of) { return (place * 7 + of * 5) % 11 - 4; };  // of a summand
  const auto whole = [&](std::int64_t place, int summands) {
    std::int64_t sum = 0;
    for (int i = 0; i < summands; ++i) sum += part(place, i);
    return sum;
  };
  std::map<int, Sizes> gradients;
  const auto summands_of = [&](int rank) { return holders_along(placement, grid, placement.summed, rank); };
  std::int64_t squares = 0;
  int summands = 1;
  for (int rank = 0; rank < grid.ranks(); ++rank) {
    if (!holds(placement, grid, rank)) continue;
    const auto ranks = summands_of(rank);
    summands = static_cast<int>(ranks.size());
    const auto own = static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
    for (const std::int64_t place : places(placement, grid, rank))
      gradients[rank].push_back(part(place, own));
  }
  for (int rank = 0; rank < grid.ranks(); ++rank) {
    if (!holds(placement, grid, rank)) continue;
    const Sizes mine = places(placement, grid, rank);
    const Range owned = owned_part(placement, grid, rank);
    for (std::size_t i = 0; i < mine.size(); ++i) {
      std::int64_t sum = 0;
      for (const int other : summands_of(rank)) sum += gradients[other].at(i);
      RC_ASSERT(sum == whole(mine[i], summands));
      const auto at = static_cast<std::int64_t>(i);
      if (at >= owned.begin && at < owned.end) squares += sum * sum;
    }
  }
  std::int64_t wanted = 0;
  for (std::int64_t place = 0; place < product(placement.whole_shape); ++place)
    wanted += whole(place, summands) * whole(place, summands);
  RC_ASSERT(squares == wanted);
}

}  // namespace
}  // namespace isograd
