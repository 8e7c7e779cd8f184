#include "verify/traffic.hpp"

#include <limits>
#include <map>
#include <set>

#include "isograd/fully_shard.hpp"
#include "layout/flat.hpp"
#include "parallel/data/rank_roles.hpp"
#include "parallel/data/unit_handle.hpp"
#include "parallel/data/unit_plan.hpp"

namespace isograd {

std::optional<std::vector<SummedElements>> gathered_by(const VerifyModel& model, const RunConfig& config,
                                                       const Grid& grid, int rank) {
  for (const auto& [name, tensor] : model.named)
    if (!tensor.requires_grad()) return std::nullopt;
  const auto& blocks = model.units->blocks;
  std::map<const c10::TensorImpl*, std::set<std::size_t>> units_of;  // blocks from 1
  std::set<const void*> seen;
  for (std::size_t block = 0; block < blocks.size(); ++block) {
    if (!seen.insert(blocks[block].binding().get()).second) return std::nullopt;
    for (const at::Tensor& tensor : blocks[block].binding()->parameters())
      units_of[tensor.unsafeGetTensorImpl()].insert(block + 1);
  }
  const Layout::Named placements = model.placed ? model.placed->placements() : Layout::Named{};
  std::vector<std::vector<NamedParameter>> units(blocks.size() + 1);
  for (const NamedParameter& parameter : unit_members(model.named, placements, grid, rank).trained) {
    const auto own = units_of.find(parameter.tensor.unsafeGetTensorImpl());
    // What several blocks have belongs to the root.
    units[own != units_of.end() && own->second.size() == 1 ? *own->second.begin() : 0].push_back(parameter);
  }
  std::vector<SummedElements> gathered;
  for (const auto& unit : units)
    for (BucketPlan& plan : plan_buckets(unit, std::numeric_limits<std::int64_t>::max())) {
      pad_for(plan, grid.size(sharded_along(grid, plan.sync, sharded_axes(config))));
      const bool whole = &unit == &units.front() || !config.parallel.reshard_after_forward;
      gathered.push_back({.sync = plan.sync, .numel = plan.numel, .whole = whole ? plan.numel : 0});
    }
  return gathered;
}

std::pair<double, double> traffic_by_plan(const RunConfig& config, const RanksOfRun& ranks,
                                          DataParallel& layout,
                                          const std::optional<std::vector<SummedElements>>& gathered,
                                          std::int64_t rounds, at::ScalarType dtype) {
  const bool units = stage_of(config.parallel.strategy) == 3;
  if (units && !gathered) return {0, 0};
  DataParallelPlan plan = make_plan(config, 0, ranks);
  plan.bytes.parameter = plan.bytes.gradient = dtype == at::kDouble ? 8 : 4;
  plan.micro_batches = rounds;
  const auto bytes = [&](const std::vector<SummedElements>& elements) {
    return traffic_bytes(plan, elements, layout.mesh().grid(), sharded_axes(config)).total();
  };
  if (units) return {bytes(*gathered), bytes(*gathered)};
  return {bytes(summed_elements(layout, true)), bytes(summed_elements(layout, false))};
}

}  // namespace isograd
