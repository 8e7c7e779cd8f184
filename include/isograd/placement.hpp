// Placement: where one parameter lives on the axes of a grid, and whose gradients add up. Integer arithmetic
// alone. Who holds which slice, who owns which element, and which ranks hold copies follow from it.
#pragma once

#include "isograd/cxx20.hpp"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "isograd/grid.hpp"

namespace isograd {

// A half-open range of elements.
struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const { return end - begin; }
};

// Rank `rank`'s part of `numel` elements split into `size` contiguous parts whose boundaries are multiples of
// `alignment` elements: disjoint, complete, possibly empty. The owner of an element is the rank whose slice
// has it.
Range owned_slice(std::int64_t numel, int rank, int size, std::int64_t alignment = 16);

// One dimension of a parameter, dealt to the ranks along an axis (of the grid, or a factor of a view).
struct Cut {
  std::string axis;
  int dim = 0;
  // The dimension consists of these, one after another, and each is cut by itself: the rows of query, key and
  // value heads in one tensor. One block as a rule.
  std::vector<std::int64_t> blocks;
  // [block][place along the axis]: how many of a block's rows a rank holds, in the order of the ranks. Ranks
  // may hold different numbers of rows, and none.
  std::vector<std::vector<std::int64_t>> rows;

  bool operator==(const Cut&) const = default;
};

// As even as possible in pieces of `unit` rows, which stay together (the rows of a head); the first ranks
// along the axis get one piece more.
Cut even_cut(const Grid& grid, const std::string& axis, int dim, std::vector<std::int64_t> blocks,
             std::int64_t unit = 1);

struct Placement {
  std::vector<std::int64_t> whole_shape;
  std::vector<Cut> cuts{};
  // Coordinates along the stage axis whose ranks hold the parameter, ascending: one as a rule, two for an
  // embedding whose ends lie in different stages. Empty: every stage.
  std::vector<int> stages{};
  // Axes along which ranks hold copies and each rank's gradient is a part of the whole: a part of copies().
  // Along the other axes of copies() every rank computes the same gradient already. The stage axis here means
  // the stages that hold the parameter.
  AxisSet summed{};

  bool operator==(const Placement&) const = default;
};

// What parameters must have in common to share a flat buffer: along which axes their gradients are summed,
// and along which ranks hold copies, among which elements are dealt to owners. Axes of one rank are left out,
// so that what amounts to the same is equal.
struct SyncAxes {
  AxisSet summed, copies;
  auto operator<=>(const SyncAxes&) const = default;
};

// A placement whose gradient is summed along the data axes on which it is not cut, and along `summed` beside
// them.
Placement placed(const Grid& grid, std::vector<std::int64_t> whole_shape, std::vector<Cut> cuts = {},
                 std::vector<int> stages = {}, const AxisSet& summed = {});

// ConfigError that names the parameter, and the axis where one is concerned: a cut of a dimension that does
// not exist, two cuts of one dimension or along the same ranks, an axis that does not exist, blocks that do
// not add up to the dimension, rows that do not add up to their block, stages out of order or outside the
// grid, a sum along an axis on which there are no copies.
void check_placement(const std::string& name, const Placement& placement, const Grid& grid);

// What follows from a placement that check_placement() accepts.

// The axes along which ranks hold the same elements: those of the grid on which the parameter is neither cut
// nor absent. Where it is cut along a factor of a view, the other factors stand for the axes of that view.
AxisSet copies(const Placement& placement, const Grid& grid);

SyncAxes sync_axes(const Placement& placement, const Grid& grid);

bool holds(const Placement& placement, const Grid& grid, int rank);

// The ranks that hold the parameter and differ from `rank` along these axes of copies() alone, ascending.
// `rank` holds the parameter.
std::vector<int> holders_along(const Placement& placement, const Grid& grid, const AxisSet& along, int rank);

// What `rank` holds: the shape of its local tensor, {0} where it does not hold the parameter.
std::vector<std::int64_t> local_shape(const Placement& placement, const Grid& grid, int rank);

// A box of elements that a rank holds, of `sizes`, and where it begins in the whole tensor and in the rank's.
struct Slice {
  std::vector<std::int64_t> whole, local, sizes;
};
// The slices of the whole tensor that make up the local one: one as a rule, one more for each further block
// of a cut dimension; none that is empty.
std::vector<Slice> slices(const Placement& placement, const Grid& grid, int rank);

// Of the elements of the rank's local tensor, in their order, those that `rank` owns: its slice over the
// ranks that hold copies. Every element has one owner among all ranks. Empty where the rank holds nothing.
Range owned_part(const Placement& placement, const Grid& grid, int rank);

// The placement in words, by aspect: name, shape, cuts, stages, summed axes.
std::vector<std::string> describe(const std::string& name, const Placement& placement);

}  // namespace isograd
