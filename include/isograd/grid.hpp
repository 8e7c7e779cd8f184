// Grid: ranks as points on named axes. Integer arithmetic only: no communication, no models.
#pragma once

#include "isograd/error.hpp"

#include <optional>
#include <set>
#include <string>
#include <vector>

namespace isograd {

struct Axis {
  std::string name;
  int size = 1;
};

// Names of axes, of the grid or of its views.
using AxisSet = std::set<std::string>;

// Axes along which ranks see different data.
inline const AxisSet kDataAxes{"dp_replicate", "dp_shard", "cp_ring", "cp_ulysses"};
// Axes over which samples are assigned, and axes over which each sample's tokens are split. Together: the
// data axes.
inline const AxisSet kSampleAxes{"dp_replicate", "dp_shard"}, kContextAxes{"cp_ring", "cp_ulysses"};
// The axis of pipeline stages, the only one along which a parameter may be absent.
inline constexpr const char* kStageAxis = "pp";
// The data axes without replicas: along these, ranks keep shards by default.
inline const AxisSet kShardedAxes{"dp_shard", "cp_ring", "cp_ulysses"};

// Ranks 0 ... ranks() - 1 on axes, the outermost first: neighbours differ along the last one. Every size is 1
// or more.
//
// A view gives other names to the ranks along some axes: it splits them into `factors`, neighbours along the
// innermost. Example: `{"edp", 2}, {"ep", 4}` over dp_shard x cp_ring of 8 ranks in all. A factor may be used
// like an axis, and so may axis_at(), by ranks that are there.
class Grid {
 public:
  // ConfigError: a size below 1, a name used twice, sizes that do not multiply to `ranks` (says which would).
  Grid(std::vector<Axis> axes, int ranks);
  explicit Grid(std::vector<Axis> axes);  // with as many ranks as the axes make

  // Returns this grid with one more view. ConfigError: no such axis, a name used already, factors whose sizes
  // do not multiply to the number of ranks along `of` (says which would).
  Grid viewed(const AxisSet& of, std::vector<Axis> factors) const;

  int ranks() const { return ranks_; }
  const std::vector<Axis>& axes() const { return axes_; }  // outermost first, without views
  AxisSet names() const;                                   // of axes()
  bool has(const std::string& name) const;                 // an axis or a factor of a view

  // The functions below throw ConfigError for an unknown name (they list the known ones), and for an axis
  // together with a factor of its own ranks.

  // Number of ranks that differ along these axes alone: 1 for none.
  int size(const AxisSet& along) const;
  // The ranks that differ from `rank` along these axes alone, itself among them, ascending.
  std::vector<int> ranks_along(const AxisSet& along, int rank) const;
  // The place of `rank` in ranks_along().
  int place(const AxisSet& along, int rank) const;
  // The names that together with `along` address every rank once: the other factors of its views, and the
  // other axes.
  AxisSet complement(const AxisSet& along) const;
  // The grid's axes that a name stands for: itself, those that its view regroups, or that of axis_at().
  AxisSet axes_of(const std::string& name) const;

  std::string text() const;                      // "dp_shard 4 x tp 2"
  std::string text(const AxisSet& along) const;  // of these alone

 private:
  // Each axis is a view with itself as the only factor.
  struct View {
    AxisSet of;
    std::vector<Axis> factors;
  };
  // Some places along an axis, as axis_at() names them.
  struct Part {
    std::string axis;
    std::vector<int> places;
  };
  std::optional<Part> part_of(const std::string& name) const;
  const View* view_of(const std::string& name) const;  // null: an unknown name
  void check(const AxisSet& along) const;
  // The rank's coordinates along these axes and factors, in the order of the views.
  std::vector<int> places(const AxisSet& along, int rank) const;

  std::vector<Axis> axes_;
  int ranks_ = 1;
  std::vector<View> views_{};
};

// Names the ranks at these places along an axis, ascending: "pp[0,3]" is the first and the last of four
// stages.
std::string axis_at(const std::string& axis, const std::vector<int>& places);

// The data axes of `ranks` ranks, outermost first: dp_replicate, dp_shard, cp_ring, cp_ulysses. dp_shard is
// the rest. ConfigError unless the other sizes are 1 or more and divide the ranks.
struct DataAxes {
  int dp_replicate = 1, cp_ring = 1, cp_ulysses = 1;
};
Grid data_grid(int ranks, const DataAxes& sizes = {});

// Returns `of` without the names in `but`.
AxisSet without(AxisSet of, const AxisSet& but);

// The data axes that the grid has.
AxisSet data_axes(const Grid& grid);

}  // namespace isograd
