// Refuses invalid placements and describes a placement in words.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <optional>

#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "isograd/parameters.hpp"

namespace isograd {
namespace {

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
