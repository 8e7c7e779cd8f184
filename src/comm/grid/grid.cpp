#include "isograd/grid.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <limits>

#include "base/refuse.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

// Coordinates of the `index`-th point, the outermost axis first.
std::vector<int> unravel(int index, const std::vector<Axis>& axes) {
  std::vector<int> result(axes.size());
  for (std::size_t i = axes.size(); i-- > 0;) {
    result[i] = index % axes[i].size;
    index /= axes[i].size;
  }
  return result;
}

std::string text_of(const std::vector<Axis>& axes) {
  std::vector<std::string> parts;
  for (const Axis& axis : axes) parts.push_back(fmt::format("{} {}", axis.name, axis.size));
  return parts.empty() ? "no axis" : fmt::format("{}", fmt::join(parts, " x "));
}

// Sizes below 1 count as 1. The product stops at 2^32, which exceeds any number of ranks.
std::int64_t product_of(const std::vector<Axis>& axes) {
  std::int64_t product = 1;
  for (const Axis& axis : axes)
    product = std::min<std::int64_t>(product * std::max(axis.size, 1), std::int64_t{1} << 32);
  return product;
}

int ranks_of(const std::vector<Axis>& axes) {
  const std::int64_t product = product_of(axes);
  if (product > std::numeric_limits<int>::max())
    refuse("the axes of the ranks", text_of(axes),
           fmt::format("at most {} ranks", std::numeric_limits<int>::max()), "Make an axis smaller");
  return static_cast<int>(product);
}

// The single changes that make the product right; empty: none does.
std::vector<std::string> possible(const std::vector<Axis>& axes, std::int64_t ranks) {
  std::vector<std::string> changes;
  for (const Axis& axis : axes) {
    std::vector<Axis> others_of = axes;
    others_of.erase(others_of.begin() + (&axis - axes.data()));
    const std::int64_t others = product_of(others_of);
    if (ranks % others == 0) changes.push_back(fmt::format("{} {}", axis.name, ranks / others));
  }
  return changes;
}

void check_sizes(const std::vector<Axis>& axes, std::int64_t ranks, const std::string& where) {
  const std::int64_t product = product_of(axes);
  const bool sound = std::all_of(axes.begin(), axes.end(), [](const Axis& axis) { return axis.size >= 1; });
  if (sound && product == ranks) return;
  const auto changes = sound ? possible(axes, ranks) : std::vector<std::string>{};
  refuse(where, fmt::format("{} for {} ranks", text_of(axes), ranks),
         fmt::format("sizes of 1 or more whose product is {}{}{}", ranks,
                     changes.empty() ? "" : ", with one of them changed: ", fmt::join(changes, " or ")),
         sound ? fmt::format("Change a size, or take {} ranks", product) : "Change the size");
}

}  // namespace

Grid::Grid(std::vector<Axis> axes, int ranks) : axes_(std::move(axes)), ranks_(ranks) {
  check_sizes(axes_, ranks_, "the axes of the ranks");
  AxisSet seen;
  for (const Axis& axis : axes_)
    if (!seen.insert(axis.name).second)
      refuse("the axes of the ranks", fmt::format("'{}' twice", axis.name), "every name once",
             "Rename one of them");
  for (const Axis& axis : axes_) views_.push_back({{axis.name}, {axis}});
}

Grid::Grid(std::vector<Axis> axes) : Grid(axes, ranks_of(axes)) {}

Grid Grid::viewed(const AxisSet& of, std::vector<Axis> factors) const {
  for (const auto& name : of)
    if (!names().count(name))
      refuse("a view of axes", fmt::format("'{}'", name), fmt::format("one of {}", fmt::join(names(), ", ")),
             "Name axes of the grid");
  check_sizes(factors, size(of), fmt::format("the view of {}", text(of)));
  Grid result = *this;
  for (const Axis& factor : factors) {
    const bool twice = std::count_if(factors.begin(), factors.end(),
                                     [&](const Axis& a) { return a.name == factor.name; }) > 1;
    if (twice || has(factor.name))
      refuse(fmt::format("the view of {}", text(of)), fmt::format("'{}' again", factor.name),
             "a name that no axis and no factor has", "Rename the factor");
  }
  result.views_.push_back({of, std::move(factors)});
  return result;
}

AxisSet Grid::names() const {
  AxisSet result;
  for (const Axis& axis : axes_) result.insert(axis.name);
  return result;
}

const Grid::View* Grid::view_of(const std::string& name) const {
  for (const View& view : views_)
    for (const Axis& factor : view.factors)
      if (factor.name == name) return &view;
  const auto part = part_of(name);
  return part ? view_of(part->axis) : nullptr;
}

std::optional<Grid::Part> Grid::part_of(const std::string& name) const {
  const std::size_t bracket = name.find('[');
  if (bracket == std::string::npos) return std::nullopt;
  Part part{.axis = name.substr(0, bracket), .places = {}};
  for (const char* at = name.data() + bracket; at + 1 < name.data() + name.size();) {
    const auto [end, error] = std::from_chars(at + 1, name.data() + name.size(), part.places.emplace_back());
    if (error != std::errc()) return std::nullopt;
    at = end;
    if (*at == ']') break;
  }
  const bool ascending = std::is_sorted(part.places.begin(), part.places.end(), std::less_equal<>());
  const bool sound = names().count(part.axis) && !part.places.empty() && ascending &&
                     part.places.front() >= 0 && part.places.back() < size({part.axis}) &&
                     name == axis_at(part.axis, part.places);
  return sound ? std::optional(std::move(part)) : std::nullopt;
}

bool Grid::has(const std::string& name) const { return view_of(name) != nullptr; }

void Grid::check(const AxisSet& along) const {
  for (const auto& name : along) {
    if (has(name)) continue;
    AxisSet all;
    for (const View& view : views_)
      for (const Axis& factor : view.factors) all.insert(factor.name);
    refuse("an axis of the ranks", fmt::format("'{}'", name), fmt::format("one of {}", fmt::join(all, ", ")),
           "Correct the name");
  }
  for (const auto& name : along) {
    const View& own = *view_of(name);
    if (own.of.count(name)) continue;  // an axis: the check of its other names finds it
    const bool part = part_of(name).has_value();
    for (const auto& other_name : along) {
      const View& other = *view_of(other_name);
      const bool overlaps = part ? name != other_name && &own == &other
                                 : &own != &other && std::ranges::any_of(own.of, [&](const auto& axis) {
                                     return other.of.count(axis);
                                   });
      if (overlaps)
        refuse("axes of the ranks", fmt::format("{}", fmt::join(along, ", ")),
               fmt::format("'{}' without other names of its ranks", name),
               part ? "Name the axis, or places along it once" : "Name the axes, or the factors of one view");
    }
  }
}

std::vector<int> Grid::places(const AxisSet& along, int rank) const {
  const std::vector<int> own = unravel(rank, axes_);
  std::vector<int> result;
  for (const View& view : views_) {
    int index = 0;  // of the rank among those along the axes of the view
    for (std::size_t i = 0; i < axes_.size(); ++i)
      if (view.of.count(axes_[i].name)) index = index * axes_[i].size + own[i];
    const std::vector<int> by_factor = unravel(index, view.factors);
    for (std::size_t i = 0; i < by_factor.size(); ++i)
      if (along.count(view.factors[i].name)) result.push_back(by_factor[i]);
  }
  return result;
}

int Grid::size(const AxisSet& along) const {
  check(along);
  int product = 1;
  for (const auto& name : along)
    if (const auto part = part_of(name)) product *= static_cast<int>(part->places.size());
  for (const View& view : views_)
    for (const Axis& factor : view.factors)
      if (along.count(factor.name)) product *= factor.size;
  return product;
}

std::vector<int> Grid::ranks_along(const AxisSet& along, int rank) const {
  const AxisSet others = complement(along);
  const std::vector<int> elsewhere = places(others, rank);
  const auto at_places = [&](int other) {
    return std::all_of(along.begin(), along.end(), [&](const std::string& name) {
      const auto part = part_of(name);
      return !part || std::ranges::binary_search(part->places, places({part->axis}, other)[0]);
    });
  };
  ISOGRAD_INVARIANT(at_places(rank), fmt::format("rank {} along {}", rank, fmt::join(along, ", ")));
  std::vector<int> result;
  for (int other = 0; other < ranks_; ++other)
    if (places(others, other) == elsewhere && at_places(other)) result.push_back(other);
  return result;
}

int Grid::place(const AxisSet& along, int rank) const {
  check(along);
  // Ranks along axes ascend with their coordinates. Along factors of views they need not.
  if (std::ranges::includes(names(), along)) {
    const std::vector<int> own = unravel(rank, axes_);
    int index = 0;
    for (std::size_t i = 0; i < axes_.size(); ++i)
      if (along.count(axes_[i].name)) index = index * axes_[i].size + own[i];
    return index;
  }
  const std::vector<int> ranks = ranks_along(along, rank);
  return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

AxisSet Grid::complement(const AxisSet& along) const {
  check(along);
  AxisSet named;
  for (const auto& name : along) {
    const auto part = part_of(name);
    named.insert(part ? part->axis : name);
  }
  AxisSet result = without(names(), named);
  for (const View& view : views_) {
    const auto is_named = [&](const Axis& factor) { return named.count(factor.name) > 0; };
    if (std::ranges::none_of(view.factors, is_named)) continue;
    result = without(std::move(result), view.of);
    for (const Axis& factor : view.factors)
      if (!is_named(factor)) result.insert(factor.name);
  }
  return result;
}

AxisSet Grid::axes_of(const std::string& name) const {
  check({name});
  return view_of(name)->of;
}

std::string Grid::text() const { return text_of(axes_); }

std::string Grid::text(const AxisSet& along) const {
  std::vector<Axis> chosen;
  for (const Axis& axis : axes_)
    if (along.count(axis.name)) chosen.push_back(axis);
  for (const auto& name : along)
    if (const auto part = part_of(name)) chosen.push_back({name, size({name})});
  for (const View& view : views_)
    for (const Axis& factor : view.factors)
      if (along.count(factor.name) && !view.of.count(factor.name)) chosen.push_back(factor);
  return text_of(chosen);
}

std::string axis_at(const std::string& axis, const std::vector<int>& places) {
  return fmt::format("{}[{}]", axis, fmt::join(places, ","));
}

Grid data_grid(int ranks, const DataAxes& sizes) {
  const std::vector<Axis> asked{
      {"dp_replicate", sizes.dp_replicate}, {"cp_ring", sizes.cp_ring}, {"cp_ulysses", sizes.cp_ulysses}};
  std::int64_t product = 1;
  for (const Axis& axis : asked) product = axis.size < 1 || product > ranks ? 0 : product * axis.size;
  if (product == 0 || ranks % product != 0) {
    std::vector<int> possible;
    for (int size = 1; size <= ranks; ++size)
      if (ranks % size == 0) possible.push_back(size);
    refuse("the axes of the ranks", fmt::format("{} for {} ranks", text_of(asked), ranks),
           fmt::format("sizes of 1 or more whose product divides the ranks: {}", fmt::join(possible, ", ")),
           "Change parallel.replicas, parallel.cp_ring, parallel.cp_ulysses or the ranks");
  }
  const auto shards = static_cast<int>(ranks / product);
  return Grid({asked[0], {"dp_shard", shards}, asked[1], asked[2]}, ranks);
}

AxisSet without(AxisSet of, const AxisSet& but) {
  for (const auto& name : but) of.erase(name);
  return of;
}

AxisSet data_axes(const Grid& grid) { return without(grid.names(), without(grid.names(), kDataAxes)); }

}  // namespace isograd
