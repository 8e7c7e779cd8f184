// Where each parameter of a run is on a rank, and the same as text and as JSON.
#include "train/rank_layout.hpp"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <unordered_map>

#include "base/json.hpp"
#include "base/number_ranges.hpp"
#include "base/print.hpp"
#include "base/refuse.hpp"
#include "layout/flat.hpp"
#include "report/report.hpp"
#include "train/config_table.hpp"
#include "train/device.hpp"
#include "train/memory.hpp"
#include "train/task.hpp"

namespace isograd {
namespace {

// The part of a bucket's range that overlaps a slot, in elements of the slot.
Range in_slot(Range range, const Slot& slot) {
  const Range part = within(range, slot);
  return part.size() == 0 ? Range{} : Range{part.begin - slot.offset, part.end - slot.offset};
}

std::vector<OwnedBy> in_slot(const std::vector<OwnedBy>& owners, const Slot& slot) {
  std::vector<OwnedBy> result;
  auto owner = std::partition_point(owners.begin(), owners.end(),
                                    [&](const OwnedBy& one) { return one.elements.end <= slot.offset; });
  for (; owner != owners.end() && owner->elements.begin < slot.offset + slot.numel; ++owner)
    result.push_back({owner->rank, in_slot(owner->elements, slot)});
  return result;
}

// The roles of the ranks that hold copies of what a rank holds.
using Roles = std::vector<std::pair<int, RankRoles>>;

Roles roles_of(const PlannedBucket& bucket, const Grid& grid, int rank) {
  Roles result;
  for (const int other : grid.ranks_along(bucket.plan.sync.copies, rank))
    result.emplace_back(other, RankRoles(grid, bucket.plan.sync, bucket.asked, other));
  return result;
}

LaidBucket lay_out_bucket(PlannedBucket planned, const Roles& roles, int rank) {
  LaidBucket result;
  for (const auto& [other, role] : roles) {
    const HeldRanges share = role.held_ranges(planned.plan.numel, planned.in_shards);
    if (other == rank) result.held = share.held, result.sharded = share.sharded;
    if (share.owned.size() > 0) result.owners.push_back({other, share.owned});
  }
  std::sort(result.owners.begin(), result.owners.end(),
            [](const OwnedBy& a, const OwnedBy& b) { return a.elements.begin < b.elements.begin; });
  result.padding = planned.plan.numel;
  for (const Slot& slot : planned.plan.slots) result.padding -= slot.numel;
  result.planned = std::move(planned);
  return result;
}

// Bytes of `numel` elements of the bucket, of which the rank holds `held`.
PersistentBytes kept_of(std::int64_t numel, std::int64_t held, const PlannedBucket& bucket,
                        const ElementBytes& bytes) {
  const auto gradient = static_cast<std::int64_t>(c10::elementSize(bucket.gradients));
  return {.parameters = (bucket.parameters_in_shards ? held : numel) * bytes.parameter,
          .gradients = (bucket.gradients_in_shards ? held : numel) * gradient,
          .master = held * bytes.master,
          .state = held * bytes.state};
}

// ---- as text ----

constexpr std::size_t kColumns = 100;  // of a line

std::string table(TextRows rows) { return text_table(std::move(rows), {.most_columns = kColumns}); }

// The first of many, and how many more there are.
std::string listed(const std::vector<std::string>& all, std::size_t most) {
  const std::size_t shown = std::min(all.size(), most);
  std::string text = fmt::format("{}", fmt::join(all.begin(), all.begin() + static_cast<long>(shown), ", "));
  return shown == all.size() ? text : text + fmt::format(", +{}", all.size() - shown);
}

// The axes that have several ranks, in the order of the grid.
std::vector<std::string> several(const Grid& grid, const AxisSet& axes) {
  std::vector<std::string> result;
  for (const Axis& axis : grid.axes())
    if (axis.size > 1 && axes.contains(axis.name)) result.push_back(axis.name);
  return result;
}

// These, and factors of views.
std::string words(const AxisSet& axes, const Grid& grid) {
  std::vector<std::string> all = several(grid, axes);
  std::ranges::copy(without(axes, grid.names()), std::back_inserter(all));
  return all.empty() ? "no axis" : fmt::format("{}", fmt::join(all, ", "));
}

// A line that goes on in the next one, behind a comma, where it would become too long.
std::string wrapped(const std::string& line) {
  std::string text, rest = line;
  while (characters(rest) > kColumns) {
    const std::size_t comma = rest.rfind(", ", kColumns - 2);
    if (comma == std::string::npos) break;
    text += rest.substr(0, comma + 1) + "\n";
    rest = "  " + rest.substr(comma + 2);
  }
  return text + rest + "\n";
}

std::string range(Range elements) {
  if (elements.size() <= 1) return elements.size() == 0 ? "none" : std::to_string(elements.begin);
  return fmt::format("{}-{}", elements.begin, elements.end - 1);
}

// "0-3, 8".
std::string ranks_text(const std::vector<int>& ranks, std::size_t most) {
  return listed(number_ranges(ranks), most);
}

std::string shape(const std::vector<std::int64_t>& sizes) {
  return sizes.empty() ? "scalar" : fmt::format("{}", fmt::join(sizes, " x "));
}

std::string cuts_text(const Placement& placement) {
  std::vector<std::string> cuts;
  for (const Cut& cut : placement.cuts) cuts.push_back(fmt::format("{} (dim {})", cut.axis, cut.dim));
  return cuts.empty() ? "no axis" : fmt::format("{}", fmt::join(cuts, ", "));
}

// The kinds of values that are sharded along the sharded axes.
std::string in_shards(const RunLayout& run) {
  const bool parameters_shared = run.plan.share_parameters;
  std::vector<std::string> what;
  const auto any = [&](bool PlannedBucket::*part) {
    return std::any_of(run.layout.buckets.begin(), run.layout.buckets.end(),
                       [&](const LaidBucket& bucket) { return bucket.planned.*part; });
  };
  if (!parameters_shared && any(&PlannedBucket::parameters_in_shards)) what.push_back("parameters");
  if (any(&PlannedBucket::gradients_in_shards)) what.push_back("gradients");
  what.push_back("states");
  return fmt::format("{}shards: {}", parameters_shared ? "one copy, " : "", fmt::join(what, ", "));
}

std::string mesh_text(const RunLayout& run) {
  const Grid& grid = run.layout.grid;
  const TaskKind& kind = kind_of(run.config);
  AxisSet sharded, cut;
  for (const LaidBucket& bucket : run.layout.buckets)
    sharded.insert(bucket.sharded.begin(), bucket.sharded.end());
  for (const LaidParameter& parameter : run.layout.parameters)
    for (const Cut& one : parameter.placement.cuts) cut.insert(one.axis);
  TextRows rows{{"axis", "size", "data", "parameters", "hosts", "ranks"}};
  const bool several_hosts = run.hosts.count() > 1;
  const std::vector<std::string> across = axes_across(grid, run.hosts);
  for (const Axis& axis : grid.axes()) {
    std::string seen = "the same", kept = "copies", hosts = "within";
    if (kSampleAxes.contains(axis.name)) seen = fmt::format("other {}", kind.samples);
    if (kContextAxes.contains(axis.name)) seen = fmt::format("other {} of the same", kind.tokens);
    if (sharded.contains(axis.name)) kept = in_shards(run);
    if (cut.contains(axis.name)) kept = "cut";
    if (std::ranges::find(across, axis.name) != across.end()) hosts = "across";
    if (axis.size == 1) seen = kept = hosts = "-";
    rows.push_back({axis.name, std::to_string(axis.size), seen, kept, hosts,
                    ranks_text(grid.ranks_along({axis.name}, run.layout.rank), 2)});
  }
  if (!several_hosts)
    for (auto& row : rows) row.erase(row.begin() + 4);
  std::string text = wrapped(printable(run.description));
  text += fmt::format("{} rank{}, seen from rank {}\n\n", grid.ranks(), grid.ranks() == 1 ? "" : "s",
                      run.layout.rank);
  text += table(std::move(rows));
  if (several_hosts) text += wrapped(printable(hosts_text(grid, run.hosts) + "."));
  for (const std::string& said : said_of_hosts(grid, run.hosts)) text += wrapped(printable(said) + ".");
  const AxisSet data = data_axes(grid);
  text += grid.size(data) == 1
              ? std::string("Targets are counted on the one rank that has them.\n")
              : fmt::format("Targets are counted along {}: {} ranks.\n", words(data, grid), grid.size(data));
  if (normalises_by_replica(run.config))
    text += "The loss is the mean of the means of dp_replicate's replicas (loss.normalise_over).\n";
  return text;
}

std::string parameters_text(const RankLayout& layout) {
  // One table for all parameters that are cut, copied, summed and sharded alike, in the order of the first.
  std::vector<std::pair<std::string, TextRows>> tables;
  for (const LaidParameter& parameter : layout.parameters) {
    const std::string head =
        fmt::format("  cut along      {}\n  copied along   {}\n  summed along   {}\n  sharded along  {}\n",
                    cuts_text(parameter.placement), words(parameter.sync.copies, layout.grid),
                    words(parameter.sync.summed, layout.grid),
                    words(layout.buckets[parameter.bucket].sharded, layout.grid));
    auto found = std::ranges::find(tables, head, &std::pair<std::string, TextRows>::first);
    if (found == tables.end())
      found =
          tables.insert(found, {head, {{"parameter", "whole", "here", "owners", "held", "owned", "bytes"}}});
    std::int64_t owned = 0;
    std::vector<int> owners;
    for (const OwnedBy& one : parameter.owners) {
      if (one.rank == layout.rank) owned += one.elements.size();
      owners.push_back(one.rank);
    }
    found->second.push_back({parameter.name, shape(parameter.placement.whole_shape),
                             parameter.placement.cuts.empty() ? "whole" : shape(parameter.local_shape),
                             ranks_text(owners, 2), std::to_string(parameter.held.size()),
                             std::to_string(owned), std::to_string(parameter.kept.total())});
  }
  std::string text;
  for (auto& [head, rows] : tables)
    text += fmt::format("\nParameters on rank {}\n{}{}", layout.rank, head, table(rows));
  return text;
}

std::string buckets_text(const RankLayout& layout) {
  TextRows rows{{"bucket", "parameters", "elements", "padding", "held", "owners"}};
  for (std::size_t b = 0; b < layout.buckets.size(); ++b) {
    const LaidBucket& bucket = layout.buckets[b];
    std::vector<std::string> owners;
    for (const OwnedBy& one : bucket.owners)
      owners.push_back(fmt::format("{}: {}", one.rank, range(one.elements)));
    const std::string& unit = bucket.planned.unit;
    rows.push_back({unit.empty() ? std::to_string(b) : unit, std::to_string(bucket.planned.plan.slots.size()),
                    std::to_string(bucket.planned.plan.numel), std::to_string(bucket.padding),
                    range(bucket.held), listed(owners, 2)});
  }
  return "\n" + table(std::move(rows));
}

std::string totals_text(const RunLayout& run) {
  const RankLayout& layout = run.layout;
  TextRows rows{{"bytes", "parameters", "gradients", "masters", "state", "total"}};
  const auto row = [&](std::string head, const PersistentBytes& kept) {
    rows.push_back({std::move(head), std::to_string(kept.parameters), std::to_string(kept.gradients),
                    std::to_string(kept.master), std::to_string(kept.state), std::to_string(kept.total())});
  };
  row("padding", layout.padding);
  row(fmt::format("rank {}", layout.rank), layout.total);
  row("formula", persistent_bytes(run.plan));
  return "\n" + table(std::move(rows)) + wrapped(kept_by_formula(run.plan));
}

// ---- for programs: docs/layout.md has the keys ----

using LayoutJson = nlohmann::ordered_json;

LayoutJson pair_of(Range range) { return LayoutJson::array({range.begin, range.end}); }

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

std::int64_t RankLayout::numel() const {
  std::int64_t result = 0;
  for (const LaidBucket& bucket : buckets) result += bucket.planned.plan.numel - bucket.padding;
  return result;
}

RankLayout lay_out(const NamedTensors& parameters, std::vector<PlannedBucket> buckets, const Grid& grid,
                   int rank, const ElementBytes& bytes, const Layout::Named& placements) {
  RankLayout result{.grid = grid, .rank = rank, .parameters = {}, .buckets = {}, .padding = {}, .total = {}};
  std::map<std::pair<SyncAxes, AxisSet>, Roles> roles;  // the same for many buckets
  std::unordered_map<std::string, std::pair<std::size_t, const Slot*>> places;
  for (PlannedBucket& bucket : buckets) {
    Roles& ranks = roles[{bucket.plan.sync, bucket.asked}];
    if (ranks.empty()) ranks = roles_of(bucket, grid, rank);
    result.buckets.push_back(lay_out_bucket(std::move(bucket), ranks, rank));
  }
  for (std::size_t b = 0; b < result.buckets.size(); ++b) {
    const LaidBucket& bucket = result.buckets[b];
    result.total += kept_of(bucket.planned.plan.numel, bucket.held.size(), bucket.planned, bytes);
    std::int64_t padding_held = bucket.held.size();
    for (const Slot& slot : bucket.planned.plan.slots) {
      places[slot.name] = {b, &slot};
      padding_held -= within(bucket.held, slot).size();
    }
    result.padding += kept_of(bucket.padding, padding_held, bucket.planned, bytes);
  }
  for (const NamedParameter& parameter :
       trainable_parameters(held_parameters(parameters, placements, grid, rank))) {
    const auto& [b, slot] = places.at(parameter.name);
    const LaidBucket& bucket = result.buckets[b];
    const auto declared = std::find_if(placements.begin(), placements.end(),
                                       [&](const auto& one) { return one.first == parameter.name; });
    Placement placement =
        declared == placements.end() ? placed(grid, parameter.tensor.sizes().vec()) : declared->second;
    const Range held = in_slot(bucket.held, *slot);
    result.parameters.push_back({.name = parameter.name,
                                 .placement = placement,
                                 .sync = sync_axes(placement, grid),
                                 .local_shape = slot->shape,
                                 .bucket = b,
                                 .held = held,
                                 .owners = in_slot(bucket.owners, *slot),
                                 .kept = kept_of(slot->numel, held.size(), bucket.planned, bytes)});
  }
  return result;
}

RunLayout lay_out(const RunConfig& config, const NamedTensors& parameters, const ModelUnits& units,
                  const RanksOfRun& ranks, int rank, const Layout::Named& placements) {
  const Grid grid = grid_of(config, ranks.size);
  DataParallelPlan plan = make_plan(config, ranks);
  RankLayout layout = lay_out(parameters, plan_layout(config, parameters, units, ranks, rank, placements),
                              grid, rank, plan.bytes, placements);
  for (const LaidBucket& bucket : layout.buckets)
    plan.elements.at(cut_along_data(bucket.planned.plan.sync, grid) ? 1 : 0).numel +=
        bucket.planned.plan.numel - bucket.padding;
  return {.layout = std::move(layout),
          .config = config,
          .plan = plan,
          .description = describe_layout(config, ranks),
          .hosts = planned_hosts(ranks.size, 1)};
}

RunLayout lay_out(const RunConfig& config, int ranks, int rank, int hosts) {
  check_but_devices(config, ranks);
  if (rank < 0 || rank >= ranks)
    refuse(fmt::format("--rank {}", rank), fmt::format("{} rank{}", ranks, ranks == 1 ? "" : "s"),
           fmt::format("0 to {}", ranks - 1), "Name one of them, or more ranks with --ranks");
  const std::string backend = backend_of(config, ranks);
  Hosts planned = planned_hosts(ranks, hosts);
  if (hosts > 1 && (backend == "shm" || backend == "nccl"))
    refuse(fmt::format("--hosts {}", hosts), fmt::format("the backend \"{}\"", backend),
           "one that spans hosts", "Set parallel.backend = \"shm+mpi\" (docs/hosts.md)");
  const RanksOfRun on(ranks, ranks == 1 || backend == "shm" || (backend == "shm+mpi" && hosts == 1));
  const Grid grid = grid_of(config, ranks);
  const auto model = model_without_values(config);
  const auto named = model->named();
  check_groups(config, named);
  Layout::Named placements;
  if (model_parallel(config)) placements = model->placements(grid);
  for (std::size_t i = 0; i < placements.size(); ++i)
    at::Tensor(named[i].second)
        .set_data(at::empty(local_shape(placements[i].second, grid, rank), named[i].second.options()));
  RunLayout run = lay_out(config, named, model->make_units(), on, rank, placements);
  run.hosts = std::move(planned);
  return run;
}

std::string to_text(const RunLayout& run) {
  return mesh_text(run) + parameters_text(run.layout) + buckets_text(run.layout) + totals_text(run);
}

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
  return json_text(document, 2) + "\n";
}

}  // namespace isograd
