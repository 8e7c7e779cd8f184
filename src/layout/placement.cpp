// Computes from a placement which ranks hold which slice, which hold copies, and which owns each element;
// refuses contradictions and describes a placement in words.
#include "isograd/parameters.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <optional>

#include "base/refuse.hpp"

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

std::string where_of(const std::string& name, const std::string& axis) {
  return fmt::format("the placement of parameter '{}' along axis '{}'", name, axis);
}

// The grid's error for these names together; nothing if it accepts them.
std::optional<ErrorText> error_of_axes(const Grid& grid, const AxisSet& axes) {
  try {
    grid.size(axes);
    return {};
  } catch (const ConfigError& error) {
    return error.text();
  }
}

void check_rows(const std::string& where, const Cut& cut, std::int64_t dimension, int ranks) {
  const auto total = std::accumulate(cut.blocks.begin(), cut.blocks.end(), std::int64_t{0});
  const bool negative =
      std::any_of(cut.blocks.begin(), cut.blocks.end(), [](std::int64_t block) { return block < 0; });
  if (negative || total != dimension)
    refuse(where, fmt::format("blocks of {}, {} rows in all", fmt::join(cut.blocks, ", "), total),
           fmt::format("blocks that make up the {} rows of dimension {}", dimension, cut.dim),
           "Correct the sizes of the blocks");
  if (cut.rows.size() != cut.blocks.size())
    refuse(where, fmt::format("rows for {} blocks", cut.rows.size()),
           fmt::format("rows for each of the {} blocks", cut.blocks.size()), "State the rows of every block");
  for (std::size_t block = 0; block < cut.blocks.size(); ++block) {
    const auto& rows = cut.rows[block];
    const auto sum = std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
    const bool sound = std::all_of(rows.begin(), rows.end(), [](std::int64_t count) { return count >= 0; });
    if (sound && rows.size() == static_cast<std::size_t>(ranks) && sum == cut.blocks[block]) continue;
    refuse(
        where,
        fmt::format("{} rows for {} ranks of block {}: {}", sum, rows.size(), block, fmt::join(rows, ", ")),
        fmt::format("0 or more for each of {} ranks, {} in all: the block has no more and no fewer", ranks,
                    cut.blocks[block]),
        "Correct the rows, or let even_cut() make them");
  }
}

void check_stages(const std::string& name, const Placement& placement, const Grid& grid) {
  const int stages = grid.has(kStageAxis) ? grid.size({kStageAxis}) : 1;
  bool sound = true;
  for (std::size_t i = 0; i < placement.stages.size(); ++i)
    sound = sound && placement.stages[i] >= (i == 0 ? 0 : placement.stages[i - 1] + 1) &&
            placement.stages[i] < stages;
  if (!sound)
    refuse(where_of(name, kStageAxis), fmt::format("stages {}", fmt::join(placement.stages, ", ")),
           fmt::format("ascending numbers from 0 to {}, or none for every stage", stages - 1),
           "Name stages of the grid, each once");
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

void check_placement(const std::string& name, const Placement& placement, const Grid& grid) {
  const auto& shape = placement.whole_shape;
  if (std::any_of(shape.begin(), shape.end(), [](std::int64_t size) { return size < 0; }))
    refuse(fmt::format("the placement of parameter '{}'", name),
           fmt::format("shape {}", fmt::join(shape, " x ")), "sizes of 0 or more",
           "Give the shape of the whole parameter");
  check_stages(name, placement, grid);
  AxisSet taken;  // axes along which ranks do not hold the same
  if (!placement.stages.empty() && grid.has(kStageAxis)) taken.insert(kStageAxis);
  for (const Cut& cut : placement.cuts) {
    const std::string where = where_of(name, cut.axis);
    if (const auto error = error_of_axes(grid, {cut.axis}))
      refuse(where, "a cut along " + error->found, error->expected, error->action);
    if (cut.dim < 0 || static_cast<std::size_t>(cut.dim) >= shape.size())
      refuse(where, fmt::format("a cut of dimension {}", cut.dim),
             fmt::format("one of the {} dimensions of {}", shape.size(), fmt::join(shape, " x ")),
             "Correct the dimension; they count from 0");
    for (const Cut& other : placement.cuts)
      if (&other < &cut && other.dim == cut.dim)
        refuse(where, fmt::format("dimension {} cut along '{}' too", cut.dim, other.axis),
               "each dimension cut once", "Cut it along one axis, or along a view of both");
    if (!taken.insert(cut.axis).second)
      refuse(where, cut.axis == kStageAxis ? "a cut in addition to stages" : "two cuts along this axis",
             "each axis used once: ranks would miss elements otherwise", "Drop one of the two");
    if (const auto error = error_of_axes(grid, taken))
      refuse(where, "cuts along " + error->found, error->expected, "Cut along axes of different ranks");
    check_rows(where, cut, shape[static_cast<std::size_t>(cut.dim)], grid.size({cut.axis}));
  }
  const AxisSet held = copies(placement, grid);
  for (const std::string& axis : placement.summed) {
    if (held.contains(axis) || (axis == kStageAxis && placement.stages.size() > 1)) continue;
    const std::string where = where_of(name, axis);
    const auto is_cut = [&](const Cut& cut) { return cut.axis == axis; };
    if (const auto error = error_of_axes(grid, {axis}))
      refuse(where, "a sum along " + error->found, error->expected, error->action);
    refuse(where,
           std::any_of(placement.cuts.begin(), placement.cuts.end(), is_cut)
               ? "a sum along the axis on which it is cut"
               : "a sum along an axis on which there are no copies",
           fmt::format("sums along axes of its copies: {}",
                       held.empty() ? "none" : fmt::format("{}", fmt::join(held, ", "))),
           "Take the axis out of `summed`, or remove the cut");
  }
}

std::vector<std::string> describe(const std::string& name, const Placement& placement) {
  std::vector<std::string> result{fmt::format("parameter '{}'", name),
                                  fmt::format("shape [{}]", fmt::join(placement.whole_shape, ", "))};
  for (const Cut& cut : placement.cuts) {
    std::vector<std::string> rows;
    for (const auto& block : cut.rows) rows.push_back(fmt::format("{}", fmt::join(block, ", ")));
    result.push_back(fmt::format("cut of dimension {} along axis '{}': rows {}", cut.dim, cut.axis,
                                 fmt::join(rows, " and ")));
  }
  result.push_back(placement.stages.empty() ? "every stage"
                                            : fmt::format("stages {}", fmt::join(placement.stages, ", ")));
  result.push_back(placement.summed.empty()
                       ? "summed along no axis"
                       : fmt::format("summed along {}", fmt::join(placement.summed, ", ")));
  return result;
}

}  // namespace isograd
