// The buckets that a layout will make on a rank, by the arithmetic that it makes them by: no groups, no
// memory, no values.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "isograd/fully_shard.hpp"
#include "isograd/parameters.hpp"

namespace isograd {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;
using Placements = std::vector<std::pair<std::string, Placement>>;

// ---- a rank among those that a flat buffer concerns, by role ----

// A rank's part of a flat buffer, in elements.
struct HeldRanges {
  Range held;         // its values, master and state
  Range owned;        // of these what the rank counts
  AxisSet sharded{};  // where not held whole: the axes along which the other parts lie (Bucket::sharded)
};

// The axes of `asked` along which such a parameter is sharded: those that it is summed along, and factors of
// views of data axes (for experts the other one than ep). ConfigError: an axis that is no data axis.
AxisSet sharded_along(const Grid& grid, const SyncAxes& sync, const AxisSet& asked);

// Whether ranks that see different data hold different parts of such a parameter: experts along ep.
bool cut_along_data(const SyncAxes& sync, const Grid& grid);

// Whether they do of some of these parameters, frozen or not, in this stage or another. Each then computes
// for the others' data, so that all must make as many forwards and backwards.
bool any_cut_along_data(const TrainableParameters& parameters, const Grid& grid);

// The most shards that any of these parameters has; 1 where nothing is sharded. After place_parameters().
int most_shards(const TrainableParameters& parameters, const Grid& grid, const AxisSet& asked);

// From the axes that the buffer's parameters have in common: layouts make their groups by it.
struct RankRoles {
  // `asked`: axes along which ranks may keep shards, as sharded_along() takes them.
  RankRoles(const Grid& grid, const SyncAxes& sync, const AxisSet& asked, int rank);

  AxisSet summed;     // along which gradients add up
  AxisSet sharded;    // along which each rank may keep a shard, a part of `summed`
  AxisSet replicate;  // of `summed` those whose ranks keep the same shard

  int shards() const { return shards_; }
  // The rank's part of a buffer of `numel`. Held whole: a rank counts a slice over all copies. In shards: all
  // of its shard or nothing.
  HeldRanges held_ranges(std::int64_t numel, bool in_shards) const;

 private:
  int copy_, copies_;        // of the whole
  int shard_, shards_;       // along `sharded`
  bool first_of_its_shard_;  // among the ranks that keep the same one
};

// ---- buckets ----

struct PlannedBucket {
  BucketPlan plan;                    // padded
  std::string unit{};                 // that it belongs to (fully_shard)
  AxisSet asked{};                    // axes along which shards may lie, as RankRoles takes them
  bool in_shards = false;             // as RankRoles::held_ranges takes it
  bool parameters_in_shards = false;  // a rank keeps those of its share alone, or counts them of the one copy
  bool gradients_in_shards = false;
  at::ScalarType gradients = at::kFloat;  // their type
};

// The buckets of naive(), bucketed() and fully_shard() with the same arguments. Tensors may be on the meta
// device. ConfigError on placements that these would refuse by themselves.
std::vector<PlannedBucket> plan_naive(TrainableParameters parameters, const Grid& grid, int rank,
                                      const DataParallelOptions& options);
std::vector<PlannedBucket> plan_bucketed(TrainableParameters parameters, const Grid& grid, int rank,
                                         const DataParallelOptions& options);
// Frozen parameters are left out.
std::vector<PlannedBucket> plan_fully_sharded(const UnitHandle& root, const NamedTensors& named,
                                              const std::vector<UnitHandle>& blocks, const Grid& grid,
                                              int rank, const FullyShardOptions& options);

// ---- the units of a model that is fully sharded, and the flat buffers that follow, without ranks or values
// ----

// Trained and frozen parameters of the model, tied ones once. What is frozen and of another type or layout
// than parameters are trained in stays as it is, whole on every rank.
struct UnitMembers {
  TrainableParameters trained;
  std::vector<NamedParameter> frozen;

  std::array<const std::vector<NamedParameter>*, 2> lists() const { return {&trained, &frozen}; }
};

// ConfigError on what place_parameters() refuses.
UnitMembers unit_members(const NamedTensors& named, const Placements& placements, const Grid& grid, int rank);

// The units' handles, each once, the root first; and the list of uses in their terms.
struct UnitUses {
  std::vector<UnitHandle> units;
  std::vector<std::size_t> uses;
};

// ConfigError: the root among its blocks, units that a layout has taken.
UnitUses unit_uses(const UnitHandle& root, const std::vector<UnitHandle>& blocks);

// The parts of one unit.
struct UnitPlan {
  struct Flat {
    BucketPlan plan;
    bool trained;
  };
  std::string name;
  bool reshard = true, fp32_gradients = true;
  std::vector<Flat> flats{};
  std::int64_t bytes = 0;  // gathered
};

// By the places of uses.units.
std::vector<UnitPlan> plan_units(const UnitUses& uses, const NamedTensors& named, const UnitMembers& members,
                                 const FullyShardOptions& options, const Grid& grid);

// ---- rules of bucketed() ----

// For all buckets of bucketed(), from options and numbers of shards. ConfigError: a stage that it does not
// have.
struct BucketRules {
  // `parameters` as place_parameters() leaves them.
  BucketRules(const DataParallelOptions& options, const TrainableParameters& parameters, const Grid& grid);

  bool sharded = false;  // each rank of a bucket's shard group, where it has others, updates its shard
  bool parameters_shared = false;         // of the parameters, in memory that the shard group shares
  bool reduces_each_micro_batch = false;  // gradients of each micro-batch are reduced and dropped
};

// The order in which parameters fill the buckets: indices of `names`; empty where there are none. ConfigError
// unless each parameter is named once.
std::vector<std::size_t> order_by_names(const std::vector<NamedParameter>& parameters,
                                        const std::vector<std::string>& names);

}  // namespace isograd
