// Grid: ranks as points on named axes. Integer arithmetic alone: no communication, nothing of models.
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

// Along which ranks see different data.
inline const AxisSet kDataAxes{"dp_replicate", "dp_shard", "cp_ring", "cp_ulysses"};
// Along which samples are dealt, and along which each sample's tokens are cut: together the data axes.
inline const AxisSet kSampleAxes{"dp_replicate", "dp_shard"}, kContextAxes{"cp_ring", "cp_ulysses"};
// The axis of pipeline stages, the only one along which a parameter may be absent.
inline constexpr const char* kStageAxis = "pp";
// The data axes but for that of replicas: along which ranks keep shards, if not told otherwise.
inline const AxisSet kShardedAxes{"dp_shard", "cp_ring", "cp_ulysses"};

// Ranks 0 ... ranks() - 1 on axes, the outermost first: neighbours differ along the last one. Every size is 1
// or more, so that a grid may have axes that nothing lies along.
//
// A view gives other names to the ranks along some axes: they are dealt to `factors`, the innermost factor
// being neighbours. `{"edp", 2}, {"ep", 4}` over dp_shard x cp_ring of 8 ranks in all. A factor is asked for
// like an axis, and so is axis_at(), by ranks that lie there.
class Grid {
 public:
  // ConfigError: a size below 1, a name used twice, sizes that do not multiply to `ranks` (says which would).
  Grid(std::vector<Axis> axes, int ranks);
  explicit Grid(std::vector<Axis> axes);  // of as many ranks as the axes make

  // This grid with a view more. ConfigError: no such axis, a name used already, factors whose sizes do not
  // multiply to the number of ranks along `of` (says which would).
  Grid viewed(const AxisSet& of, std::vector<Axis> factors) const;

  int ranks() const { return ranks_; }
  const std::vector<Axis>& axes() const { return axes_; }  // outermost first, without views
  AxisSet names() const;                                   // of axes()
  bool has(const std::string& name) const;                 // an axis or a factor of a view

  // Below: ConfigError for a name that there is none of (says which there are), and for an axis beside a
  // factor of its own ranks.

  // How many ranks differ along these axes alone: 1 for none.
  int size(const AxisSet& along) const;
  // The ranks that differ from `rank` along these axes alone, itself among them, ascending.
  std::vector<int> ranks_along(const AxisSet& along, int rank) const;
  // The place of `rank` in ranks_along().
  int place(const AxisSet& along, int rank) const;
  // What together with `along` names every rank once: the other factors of its views, and the other axes.
  AxisSet complement(const AxisSet& along) const;
  // The axes of the grid that a name stands for: itself, those that its view regroups, or that of axis_at().
  AxisSet axes_of(const std::string& name) const;

  std::string text() const;                      // "dp_shard 4 x tp 2"
  std::string text(const AxisSet& along) const;  // of these alone

 private:
  struct View {
    AxisSet of;
    std::vector<Axis> factors;
  };
  // Some places along an axis: what axis_at() names.
  struct Part {
    std::string axis;
    std::vector<int> places;
  };
  std::optional<Part> part_of(const std::string& name) const;
  // With the axis in the place of each part of one.
  AxisSet without_parts(const AxisSet& along) const;
  // Where `rank` lies along what is not in `along`: equal for ranks that differ along these axes alone.
  std::vector<int> elsewhere(const AxisSet& along, int rank) const;
  std::vector<int> coordinates(int rank) const;  // by axes_
  const View* view_of(const std::string& factor) const;
  void check(const AxisSet& along) const;

  std::vector<Axis> axes_;
  int ranks_ = 1;
  std::vector<View> views_{};
};

// The name of the ranks at these places along an axis, ascending: "pp[0,3]", the first and the last of four
// stages.
std::string axis_at(const std::string& axis, const std::vector<int>& places);

// The data axes of `ranks` ranks, outermost first: dp_replicate, dp_shard, cp_ring, cp_ulysses. dp_shard is
// what the others leave. ConfigError unless the others' sizes are 1 or more and divide the ranks.
struct DataAxes {
  int dp_replicate = 1, cp_ring = 1, cp_ulysses = 1;
};
Grid data_grid(int ranks, const DataAxes& sizes = {});

// Of `of` without those of `but`.
AxisSet without(AxisSet of, const AxisSet& but);

// Those of the data axes that the grid has.
AxisSet data_axes(const Grid& grid);

}  // namespace isograd
