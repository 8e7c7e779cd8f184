#include "parallel/data/unit_plan.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <unordered_map>
#include <unordered_set>

#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "layout/flat.hpp"
#include "parallel/data/rank_roles.hpp"
#include "parallel/data/unit_node.hpp"

namespace isograd {
namespace {

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
  for (std::size_t unit = 0; unit < units.size(); ++unit) {
    std::vector<std::string> names;
    for (const auto* list : members.lists()) {
      std::vector<NamedParameter> mine;
      std::vector<std::size_t> places;
      for (std::size_t i = 0; i < list->size(); ++i)
        if (unit_of.at((*list)[i].tensor.unsafeGetTensorImpl()) == unit) {
          mine.push_back((*list)[i]);
          names.push_back((*list)[i].name);
          places.push_back(i);
        }
      for (BucketPlan& plan : plan_buckets(mine, std::numeric_limits<std::int64_t>::max())) {
        for (Slot& slot : plan.slots) slot.index = places[slot.index];
        const int shards = grid.size(sharded_along(grid, plan.sync, options.sharded));
        pad_for(plan, shards);
        if (mine.front().tensor.is_meta()) plan.device = options.device;
        if (shards > 1 && !options.share_parameters)
          units[unit].bytes += plan.numel * static_cast<std::int64_t>(c10::elementSize(plan.dtype));
        units[unit].flats.push_back({std::move(plan), list == &members.trained});
      }
    }
    const auto& own = uses.units[unit].binding()->reshard;
    units[unit].fp32_gradients = uses.units[unit].binding()->fp32_gradients.value_or(options.fp32_gradients);
    units[unit].name = name_of(unit, names);
    units[unit].reshard =
        own.value_or(unit == kRootUnit ? options.reshard_root : options.reshard_after_forward);
  }
  return units;
}

}  // namespace isograd
