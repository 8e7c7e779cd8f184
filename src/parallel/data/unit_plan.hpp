// Which parameter belongs to which unit of a model that is fully sharded, and the flat buffers that follow:
// before anything is sharded, without ranks or values.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "isograd/fully_shard.hpp"

namespace isograd {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;
using Placements = std::vector<std::pair<std::string, Placement>>;

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

}  // namespace isograd
