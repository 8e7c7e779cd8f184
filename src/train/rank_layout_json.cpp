// A rank's layout for programs: docs/layout.md has the keys.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "train/rank_layout.hpp"

namespace isograd {
namespace {

using LayoutJson = nlohmann::ordered_json;

LayoutJson pair_of(Range range) {
  return LayoutJson::array({range.begin, range.end});
}

LayoutJson bytes_of(const PersistentBytes& kept) {
  return {{"parameters", kept.parameters},
          {"gradients", kept.gradients},
          {"masters", kept.master},
          {"state", kept.state},
          {"total", kept.total()}};
}

LayoutJson owners_of(const std::vector<OwnedBy>& owners) {
  LayoutJson list = LayoutJson::array();
  for (const OwnedBy& one : owners) list.push_back({{"rank", one.rank}, {"elements", pair_of(one.elements)}});
  return list;
}

// Those of several ranks, in the order of the grid.
std::vector<std::string> several(const Grid& grid, const AxisSet& axes) {
  std::vector<std::string> result;
  for (const Axis& axis : grid.axes())
    if (axis.size > 1 && axes.contains(axis.name)) result.push_back(axis.name);
  return result;
}

LayoutJson mesh_of(const RankLayout& layout, const Hosts& hosts) {
  LayoutJson axes = LayoutJson::array();
  const std::vector<std::string> across = axes_across(layout.grid, hosts);
  for (const Axis& axis : layout.grid.axes())
    axes.push_back({{"name", axis.name},
                    {"size", axis.size},
                    {"place", layout.grid.place({axis.name}, layout.rank)},
                    {"ranks", layout.grid.ranks_along({axis.name}, layout.rank)},
                    {"samples_differ", kSampleAxes.contains(axis.name)},
                    {"tokens_differ", kContextAxes.contains(axis.name)},
                    {"across_hosts", std::find(across.begin(), across.end(), axis.name) != across.end()}});
  return {{"ranks", layout.grid.ranks()},
          {"host_of_rank", hosts.of_rank},
          {"axes", axes},
          {"counted_along", several(layout.grid, data_axes(layout.grid))}};
}

LayoutJson parameter_of(const LaidParameter& parameter, const LaidBucket& bucket) {
  LayoutJson cuts = LayoutJson::array();
  for (const Cut& cut : parameter.placement.cuts)
    cuts.push_back({{"axis", cut.axis}, {"dim", cut.dim}, {"blocks", cut.blocks}, {"rows", cut.rows}});
  return {{"name", parameter.name},
          {"whole_shape", parameter.placement.whole_shape},
          {"local_shape", parameter.local_shape},
          {"cuts", cuts},
          {"stages", parameter.placement.stages},
          {"copied_along", parameter.sync.copies},
          {"summed_along", parameter.sync.summed},
          {"sharded_along", bucket.sharded},
          {"bucket", parameter.bucket},
          {"held", pair_of(parameter.held)},
          {"owners", owners_of(parameter.owners)},
          {"bytes", bytes_of(parameter.kept)}};
}

LayoutJson bucket_of(const LaidBucket& bucket) {
  LayoutJson result = {{"parameters", bucket.planned.plan.slots.size()},
                       {"elements", bucket.planned.plan.numel},
                       {"padding", bucket.padding},
                       {"held", pair_of(bucket.held)},
                       {"owners", owners_of(bucket.owners)}};
  if (!bucket.planned.unit.empty()) result["unit"] = bucket.planned.unit;
  return result;
}

}  // namespace

std::string to_json(const RunLayout& run) {
  const RankLayout& layout = run.layout;
  LayoutJson parameters = LayoutJson::array(), buckets = LayoutJson::array();
  for (const LaidParameter& parameter : layout.parameters)
    parameters.push_back(parameter_of(parameter, layout.buckets[parameter.bucket]));
  for (const LaidBucket& bucket : layout.buckets) buckets.push_back(bucket_of(bucket));
  const LayoutJson document = {{"layout", run.description},
                               {"strategy", run.config.parallel.strategy},
                               {"dtype", run.config.train.dtype},
                               {"rank", layout.rank},
                               {"mesh", mesh_of(layout, run.hosts)},
                               {"parameters", parameters},
                               {"buckets", buckets},
                               {"totals",
                                {{"elements", layout.numel()},
                                 {"padding", bytes_of(layout.padding)},
                                 {"bytes", bytes_of(layout.total)},
                                 {"formula", bytes_of(persistent_bytes(run.plan))}}}};
  return document.dump(2, ' ', false, LayoutJson::error_handler_t::replace) + "\n";
}

}  // namespace isograd
