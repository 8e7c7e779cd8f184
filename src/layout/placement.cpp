// Computes from a placement which ranks hold which slice, which hold copies, and which owns each element.
#include "isograd/parameters.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "isograd/error.hpp"

namespace isograd {
namespace {

// Rows of one dimension: where they begin in the whole tensor and in the rank's.
struct Rows {
  std::int64_t whole, local, size;
};

const Cut* cut_of(const Placement& placement, std::size_t dim) {
  for (const Cut& cut : placement.cuts)
    if (static_cast<std::size_t>(cut.dim) == dim) return &cut;
  return nullptr;
}

// Rows of a cut dimension at this place along its axis, without blocks of which the place has no row.
std::vector<Rows> rows_at(const Cut& cut, int place) {
  std::vector<Rows> result;
  std::int64_t whole = 0, local = 0;
  for (std::size_t block = 0; block < cut.blocks.size(); ++block) {
    const auto& rows = cut.rows[block];
    const auto own = rows.begin() + place;
    if (*own > 0) result.push_back({std::accumulate(rows.begin(), own, whole), local, *own});
    local += *own;
    whole += cut.blocks[block];
  }
  return result;
}

std::int64_t product(const std::vector<std::int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
}

}  // namespace

Range owned_slice(std::int64_t numel, int rank, int size, std::int64_t alignment) {
  ISOGRAD_INVARIANT(numel >= 0 && size > 0 && rank >= 0 && rank < size && alignment > 0,
                    fmt::format("numel {}, rank {} of {}, alignment {}", numel, rank, size, alignment));
  const std::int64_t blocks = (numel + alignment - 1) / alignment;
  const auto boundary = [&](std::int64_t part) {
    const std::int64_t whole = blocks / size, rest = blocks % size;  // not a mean: parts of whole blocks
    return std::min(numel, (whole * part + std::min(part, rest)) * alignment);
  };
  return {boundary(rank), boundary(rank + 1)};
}

Cut even_cut(const Grid& grid, const std::string& axis, int dim, std::vector<std::int64_t> blocks,
             std::int64_t unit) {
  const int size = grid.size({axis});
  Cut cut{.axis = axis, .dim = dim, .blocks = std::move(blocks), .rows = {}};
  for (const std::int64_t block : cut.blocks) {
    auto& rows = cut.rows.emplace_back();
    for (int place = 0; place < size; ++place) rows.push_back(owned_slice(block, place, size, unit).size());
  }
  return cut;
}

Placement placed(const Grid& grid, std::vector<std::int64_t> whole_shape, std::vector<Cut> cuts,
                 std::vector<int> stages, const AxisSet& summed) {
  Placement placement{.whole_shape = std::move(whole_shape),
                      .cuts = std::move(cuts),
                      .stages = std::move(stages),
                      .summed = summed};
  for (const std::string& name : copies(placement, grid)) {
    const AxisSet axes = grid.axes_of(name);
    if (std::includes(kDataAxes.begin(), kDataAxes.end(), axes.begin(), axes.end()))
      placement.summed.insert(name);
  }
  return placement;
}

AxisSet copies(const Placement& placement, const Grid& grid) {
  AxisSet cut;
  for (const Cut& each : placement.cuts) cut.insert(each.axis);
  AxisSet result = grid.complement(cut);
  const auto stages = static_cast<int>(placement.stages.size());
  if (stages == 0 || !result.contains(kStageAxis) || stages == grid.size({kStageAxis})) return result;
  result.erase(kStageAxis);
  if (stages > 1) result.insert(axis_at(kStageAxis, placement.stages));
  return result;
}

SyncAxes sync_axes(const Placement& placement, const Grid& grid) {
  const auto of_several_ranks = [&](const AxisSet& axes) {
    AxisSet result;
    for (const std::string& axis : axes)
      if (grid.size({axis}) > 1) result.insert(axis);
    return result;
  };
  const AxisSet held = copies(placement, grid);
  AxisSet summed = placement.summed;
  if (summed.contains(kStageAxis) && !held.contains(kStageAxis)) {  // some stages
    summed.erase(kStageAxis);
    summed.insert(axis_at(kStageAxis, placement.stages));
  }
  return {.summed = of_several_ranks(summed), .copies = of_several_ranks(held)};
}

bool holds(const Placement& placement, const Grid& grid, int rank) {
  if (placement.stages.empty() || !grid.has(kStageAxis)) return true;
  const int stage = grid.place({kStageAxis}, rank);
  return std::find(placement.stages.begin(), placement.stages.end(), stage) != placement.stages.end();
}

std::vector<int> holders_along(const Placement& placement, const Grid& grid, const AxisSet& along, int rank) {
  std::vector<int> result;
  for (const int other : grid.ranks_along(along, rank))
    if (holds(placement, grid, other)) result.push_back(other);
  return result;
}

std::vector<std::int64_t> local_shape(const Placement& placement, const Grid& grid, int rank) {
  if (!holds(placement, grid, rank)) return {0};
  std::vector<std::int64_t> shape = placement.whole_shape;
  for (const Cut& cut : placement.cuts) {
    std::int64_t& size = shape.at(static_cast<std::size_t>(cut.dim));
    size = 0;
    const int place = grid.place({cut.axis}, rank);
    for (const auto& rows : cut.rows) size += rows.at(static_cast<std::size_t>(place));
  }
  return shape;
}

std::vector<Slice> slices(const Placement& placement, const Grid& grid, int rank) {
  if (!holds(placement, grid, rank)) return {};
  std::vector<Slice> result(1);
  for (std::size_t dim = 0; dim < placement.whole_shape.size(); ++dim) {
    const Cut* cut = cut_of(placement, dim);
    const std::int64_t size = placement.whole_shape[dim];
    std::vector<Rows> parts;
    if (cut)
      parts = rows_at(*cut, grid.place({cut->axis}, rank));
    else if (size > 0)
      parts.push_back({.whole = 0, .local = 0, .size = size});
    std::vector<Slice> longer;  // each slice so far, with each part of this dimension
    for (const Slice& slice : result)
      for (const Rows& part : parts) {
        Slice& next = longer.emplace_back(slice);
        next.whole.push_back(part.whole);
        next.local.push_back(part.local);
        next.sizes.push_back(part.size);
      }
    result = std::move(longer);
  }
  return result;
}

Range owned_part(const Placement& placement, const Grid& grid, int rank) {
  if (!holds(placement, grid, rank)) return {};
  const std::vector<int> holders = holders_along(placement, grid, copies(placement, grid), rank);
  const auto place = std::find(holders.begin(), holders.end(), rank) - holders.begin();
  return owned_slice(product(local_shape(placement, grid, rank)), static_cast<int>(place),
                     static_cast<int>(holders.size()));
}

}  // namespace isograd
