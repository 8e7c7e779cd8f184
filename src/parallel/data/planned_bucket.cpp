#include "parallel/data/planned_bucket.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <unordered_map>
#include <unordered_set>

#include "base/refuse.hpp"
#include "layout/flat.hpp"
#include "parallel/data/unit_node.hpp"

namespace isograd {
namespace {

bool contains(const AxisSet& set, const AxisSet& part) {
  return std::includes(set.begin(), set.end(), part.begin(), part.end());
}

[[noreturn]] void refuse_units(std::string found, std::string expected, std::string action) {
  refuse("fully_shard", std::move(found), std::move(expected), std::move(action));
}

// Unit by tensor: the only block that has it, else the root.
std::unordered_map<const c10::TensorImpl*, std::size_t> assign(const UnitUses& uses,
                                                               const NamedTensors& named) {
  std::unordered_map<const c10::TensorImpl*, std::size_t> units;
  for (const auto& [name, tensor] : named)
    if (tensor.defined()) units[tensor.unsafeGetTensorImpl()] = kRootUnit;
  std::unordered_set<const c10::TensorImpl*> in_blocks;
  for (std::size_t unit = 1; unit < uses.units.size(); ++unit) {
    std::unordered_set<const c10::TensorImpl*> own;
    for (const at::Tensor& tensor : uses.units[unit].binding()->parameters()) {
      const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
      if (!tensor.defined() || !own.insert(impl).second) continue;
      const auto found = units.find(impl);
      if (found == units.end())
        refuse_units(fmt::format("a parameter {} of block {} that the root does not have",
                                 c10::str(tensor.sizes()), unit - 1),
                     "blocks that are registered in the root", "Register the block's module in the model");
      found->second = in_blocks.insert(impl).second ? unit : kRootUnit;
    }
  }
  return units;
}

// The common prefix of the parameters' names, up to a dot.
std::string name_of(std::size_t unit, const std::vector<std::string>& names) {
  if (unit == kRootUnit) return "root";
  std::string common = names.empty() ? "" : names.front();
  for (const std::string& name : names) {
    std::size_t same = 0;
    while (same < std::min(common.size(), name.size()) && common[same] == name[same]) ++same;
    common.resize(same);
  }
  const std::size_t dot = common.rfind('.');
  return dot == std::string::npos || dot == 0 ? fmt::format("block {}", unit - 1) : common.substr(0, dot);
}

}  // namespace

AxisSet sharded_along(const Grid& grid, const SyncAxes& sync, const AxisSet& asked) {
  if (const AxisSet others = without(asked, kDataAxes); !others.empty())
    refuse("the axes that are sharded", fmt::format("{}", fmt::join(others, ", ")),
           fmt::format("some of {}", fmt::join(kDataAxes, ", ")), "Shard along data axes");
  AxisSet result;
  for (const std::string& axis : sync.summed) {
    const AxisSet axes = grid.axes_of(axis);
    const bool is_factor = axes != AxisSet{axis};
    if (is_factor ? contains(kDataAxes, axes) : asked.contains(axis)) result.insert(axis);
  }
  return result;
}

bool cut_along_data(const SyncAxes& sync, const Grid& grid) {
  int copies = 1;  // among ranks that see different data
  for (const std::string& axis : sync.copies)
    if (contains(kDataAxes, grid.axes_of(axis))) copies *= grid.size({axis});
  return copies < grid.size(data_axes(grid));
}

bool any_cut_along_data(const TrainableParameters& parameters, const Grid& grid) {
  // By placements: a stage without any makes as many as the others.
  return std::any_of(parameters.placements.begin(), parameters.placements.end(), [&](const auto& placed) {
    return cut_along_data(sync_axes(placed.second, grid), grid);
  });
}

int most_shards(const TrainableParameters& parameters, const Grid& grid, const AxisSet& asked) {
  int most = 1;
  for (const NamedParameter* parameter : all_parameters(parameters))
    most = std::max(most, grid.size(sharded_along(grid, parameter->sync, asked)));
  for (const auto& [name, placement] : parameters.placements)  // those of other stages: all follow one rule
    most = std::max(most, grid.size(sharded_along(grid, sync_axes(placement, grid), asked)));
  return most;
}

RankRoles::RankRoles(const Grid& grid, const SyncAxes& sync, const AxisSet& asked, int rank)
    : summed(sync.summed),
      sharded(sharded_along(grid, sync, asked)),
      replicate(without(sync.summed, sharded)),
      copy_(grid.place(sync.copies, rank)),
      copies_(grid.size(sync.copies)),
      shard_(grid.place(sharded, rank)),
      shards_(grid.size(sharded)),
      first_of_its_shard_(grid.place(without(sync.copies, sharded), rank) == 0) {}

HeldRanges RankRoles::held_ranges(std::int64_t numel, bool in_shards) const {
  if (!in_shards || shards_ == 1)
    return {.held = {0, numel}, .owned = owned_slice(numel, copy_, copies_), .sharded = {}};
  const Range held = owned_slice(numel, shard_, shards_);
  return {
      .held = held, .owned = first_of_its_shard_ ? held : Range{held.begin, held.begin}, .sharded = sharded};
}

UnitMembers unit_members(const NamedTensors& named, const Placements& placements, const Grid& grid,
                         int rank) {
  NamedTensors held = named;
  for (const auto& [name, placement] : placements)  // in other stages
    if (!holds(placement, grid, rank))
      std::erase_if(held, [&](const auto& one) { return one.first == name; });
  UnitMembers members;
  members.trained = trainable_parameters(held);
  members.trained.placements = placements;
  place_parameters(members.trained, grid, rank);
  for (const NamedParameter& parameter : members.trained.frozen) {
    const at::Tensor& tensor = parameter.tensor;
    const auto type = tensor.scalar_type();
    const bool floating = type == at::kFloat || type == at::kDouble || type == at::kBFloat16;
    if (floating && tensor.layout() == at::kStrided && tensor.is_leaf()) members.frozen.push_back(parameter);
  }
  return members;
}

UnitUses unit_uses(const UnitHandle& root, const std::vector<UnitHandle>& blocks) {
  UnitUses result{.units = {root}, .uses = {kRootUnit}};
  for (const UnitHandle& block : blocks) {
    std::size_t unit = 0;
    while (unit < result.units.size() && result.units[unit].binding() != block.binding()) ++unit;
    if (unit == kRootUnit)
      refuse_units("the root among its own blocks", "blocks only", "Take it off the list");
    if (unit == result.units.size()) result.units.push_back(block);
    result.uses.push_back(unit);
  }
  for (const UnitHandle& handle : result.units)
    if (handle.bound())
      refuse_units("a model that another layout has sharded", "one layout at a time",
                   "Destroy the other layout");
  return result;
}

std::vector<UnitPlan> plan_units(const UnitUses& uses, const NamedTensors& named, const UnitMembers& members,
                                 const FullyShardOptions& options, const Grid& grid) {
  const auto unit_of = assign(uses, named);
  std::vector<UnitPlan> units(uses.units.size());
  std::vector<std::vector<std::string>> names(units.size());
  for (const auto* list : members.lists()) {
    std::vector<std::vector<std::size_t>> places(units.size());
    for (std::size_t i = 0; i < list->size(); ++i)
      places[unit_of.at((*list)[i].tensor.unsafeGetTensorImpl())].push_back(i);
    for (std::size_t unit = 0; unit < units.size(); ++unit) {
      std::vector<NamedParameter> mine;
      for (const std::size_t i : places[unit]) {
        mine.push_back((*list)[i]);
        names[unit].push_back((*list)[i].name);
      }
      for (BucketPlan& plan : plan_buckets(mine, std::numeric_limits<std::int64_t>::max())) {
        for (Slot& slot : plan.slots) slot.index = places[unit][slot.index];
        const int shards = grid.size(sharded_along(grid, plan.sync, options.sharded));
        pad_for(plan, shards);
        if (mine.front().tensor.is_meta()) plan.device = options.device;
        if (shards > 1 && !options.share_parameters)
          units[unit].bytes += plan.numel * static_cast<std::int64_t>(c10::elementSize(plan.dtype));
        units[unit].flats.push_back({std::move(plan), list == &members.trained});
      }
    }
  }
  for (std::size_t unit = 0; unit < units.size(); ++unit) {
    const auto& own = uses.units[unit].binding()->reshard;
    units[unit].fp32_gradients = uses.units[unit].binding()->fp32_gradients.value_or(options.fp32_gradients);
    units[unit].name = name_of(unit, names[unit]);
    units[unit].reshard =
        own.value_or(unit == kRootUnit ? options.reshard_root : options.reshard_after_forward);
  }
  return units;
}

std::vector<PlannedBucket> plan_naive(TrainableParameters parameters, const Grid& grid, int rank,
                                      const DataParallelOptions& options) {
  place_parameters(parameters, grid, rank);
  std::vector<PlannedBucket> result;
  for (BucketPlan& plan : plan_buckets(parameters, options.bucket_bytes)) {
    PlannedBucket& bucket = result.emplace_back();
    bucket.gradients = gradient_type(plan.dtype, options.fp32_gradients);
    bucket.plan = std::move(plan);
  }
  return result;
}

std::vector<PlannedBucket> plan_bucketed(TrainableParameters parameters, const Grid& grid, int rank,
                                         const DataParallelOptions& options) {
  place_parameters(parameters, grid, rank);
  const BucketRules rules(options, parameters, grid);
  std::vector<PlannedBucket> result;
  for (BucketPlan& plan : plan_buckets(parameters, options.bucket_bytes, options.first_bucket_bytes,
                                       order_by_names(parameters, options.order))) {
    pad_for(plan, grid.size(plan.sync.summed));
    PlannedBucket& bucket = result.emplace_back();
    bucket.asked = options.sharded;
    bucket.in_shards = rules.sharded;
    bucket.parameters_in_shards = rules.parameters_shared;
    bucket.gradients_in_shards = rules.reduces_each_micro_batch;
    bucket.gradients = gradient_type(plan.dtype, options.fp32_gradients);
    bucket.plan = std::move(plan);
  }
  return result;
}

std::vector<PlannedBucket> plan_fully_sharded(const UnitHandle& root, const NamedTensors& named,
                                              const std::vector<UnitHandle>& blocks, const Grid& grid,
                                              int rank, const FullyShardOptions& options) {
  std::vector<PlannedBucket> result;
  for (UnitPlan& unit : plan_units(unit_uses(root, blocks), named,
                                   unit_members(named, options.placements, grid, rank), options, grid))
    for (auto& [plan, trained] : unit.flats) {
      if (!trained) continue;
      PlannedBucket& bucket = result.emplace_back();
      bucket.unit = unit.name;
      bucket.asked = options.sharded;
      bucket.in_shards = bucket.parameters_in_shards = true;
      bucket.gradients_in_shards = !options.reduce_once;
      bucket.gradients = gradient_type(plan.dtype, unit.fp32_gradients);
      bucket.plan = std::move(plan);
    }
  return result;
}

BucketRules::BucketRules(const DataParallelOptions& options, const TrainableParameters& parameters,
                         const Grid& grid) {
  if (options.stage < 0 || options.stage > 2)
    refuse("stage", std::to_string(options.stage), "0, 1 or 2", "Use fully_shard() for stage 3");
  if (most_shards(parameters, grid, options.sharded) == 1) return;  // there is nothing to shard or to share
  parameters_shared = options.share_parameters;
  sharded = options.stage > 0 || parameters_shared;
  reduces_each_micro_batch = options.stage == 2 && !options.reduce_once;
}

std::vector<std::size_t> order_by_names(const std::vector<NamedParameter>& parameters,
                                        const std::vector<std::string>& names) {
  if (names.empty()) return {};
  const auto refuse = [](std::string found) {
    isograd::refuse("the order of buckets", std::move(found), "the name of each trainable parameter once",
                    "Give the order of a run of the same model, or none");
  };
  std::unordered_map<std::string, std::size_t> places;
  for (std::size_t i = 0; i < parameters.size(); ++i) places.emplace(parameters[i].name, i);
  std::vector<std::size_t> order;
  for (const std::string& name : names) {
    const auto found = places.find(name);
    if (found == places.end()) refuse(fmt::format("'{}', unknown or for the second time", name));
    order.push_back(found->second);
    places.erase(found);
  }
  if (!places.empty()) refuse(fmt::format("nothing about '{}'", places.begin()->first));
  return order;
}

}  // namespace isograd
