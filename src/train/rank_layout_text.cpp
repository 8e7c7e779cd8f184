// A rank's layout as text and as JSON.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "base/number_ranges.hpp"
#include "base/print.hpp"
#include "train/memory.hpp"
#include "train/rank_layout.hpp"
#include "train/task_kind.hpp"

namespace isograd {
namespace {

constexpr std::size_t kColumns = 100;  // of a line

using Rows = std::vector<std::vector<std::string>>;

// Characters, of which each takes one column.
std::size_t length(const std::string& text) {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

// Shortens a long name at its beginning, because the end is more specific.
std::string elided(const std::string& text, std::size_t width) {
  if (length(text) <= width) return text;
  std::string end;
  for (std::size_t at = text.size(); at-- > 0 && length(end) + 1 < width;) end.insert(end.begin(), text[at]);
  while (!end.empty() && (end.front() & 0xc0) == 0x80) end.erase(end.begin());  // an incomplete character
  return "…" + end;
}

// The first row is the heading. Columns named in `left` are aligned left; the first gives way where lines
// would become too long.
std::string table(Rows rows, const std::vector<std::size_t>& left) {
  std::vector<std::size_t> width(rows.front().size());
  for (auto& row : rows)
    for (std::size_t i = 0; i < row.size(); ++i) {
      row[i] = printable(row[i]);
      width[i] = std::max(width[i], length(row[i]));
    }
  std::size_t others = 0;
  for (std::size_t i = 1; i < width.size(); ++i) others += width[i] + 2;
  constexpr std::size_t kLeastName = 12;
  if (others + width[0] > kColumns) width[0] = std::max(kLeastName, kColumns - std::min(kColumns, others));
  std::string text;
  for (auto& row : rows) {
    std::string line;
    row[0] = elided(row[0], width[0]);
    for (std::size_t i = 0; i < row.size(); ++i) {
      const std::string padding(width[i] - std::min(width[i], length(row[i])), ' ');
      const bool to_the_left = std::find(left.begin(), left.end(), i) != left.end();
      line += (i == 0 ? "" : "  ") + (to_the_left ? row[i] + padding : padding + row[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

// The first of many, and how many more there are.
std::string listed(const std::vector<std::string>& all, std::size_t most) {
  const std::size_t shown = std::min(all.size(), most);
  std::string text = fmt::format("{}", fmt::join(all.begin(), all.begin() + static_cast<long>(shown), ", "));
  return shown == all.size() ? text : text + fmt::format(", +{}", all.size() - shown);
}

// Axes of several ranks, those of the grid in its order.
std::string words(const AxisSet& axes, const Grid& grid) {
  std::vector<std::string> ordered;
  for (const Axis& axis : grid.axes())
    if (axis.size > 1 && axes.contains(axis.name)) ordered.push_back(axis.name);
  for (const std::string& factor : without(axes, grid.names())) ordered.push_back(factor);
  return ordered.empty() ? "no axis" : fmt::format("{}", fmt::join(ordered, ", "));
}

// A line that goes on in the next one, behind a comma, where it would become too long.
std::string wrapped(const std::string& line) {
  std::string text, rest = line;
  while (length(rest) > kColumns) {
    const std::size_t comma = rest.rfind(", ", kColumns - 2);
    if (comma == std::string::npos) break;
    text += rest.substr(0, comma + 1) + "\n";
    rest = "  " + rest.substr(comma + 2);
  }
  return text + rest + "\n";
}

std::string range(std::int64_t begin, std::int64_t last) {
  return begin == last ? std::to_string(begin) : fmt::format("{}-{}", begin, last);
}
std::string range(Range elements) {
  return elements.size() == 0 ? "none" : range(elements.begin, elements.end - 1);
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
  const RankLayout& layout = run.layout;
  const TaskKind& kind = kind_of(run.config);
  const AxisSet data = data_axes(layout.grid);
  AxisSet sharded, cut;
  for (const LaidBucket& bucket : layout.buckets)
    sharded.insert(bucket.sharded.begin(), bucket.sharded.end());
  for (const LaidParameter& parameter : layout.parameters)
    for (const Cut& one : parameter.placement.cuts) cut.insert(one.axis);
  Rows rows{{"axis", "size", "data", "parameters", "ranks"}};
  const bool several_hosts = run.hosts.count() > 1;
  const std::vector<std::string> across = axes_across(layout.grid, run.hosts);
  if (several_hosts) rows[0].insert(rows[0].begin() + 4, "hosts");
  for (const Axis& axis : layout.grid.axes()) {
    const std::vector<int> ranks = layout.grid.ranks_along({axis.name}, layout.rank);
    std::string seen = "the same", kept = "copies";
    if (kSampleAxes.contains(axis.name)) seen = fmt::format("other {}", kind.samples);
    if (kContextAxes.contains(axis.name)) seen = fmt::format("other {} of the same", kind.tokens);
    if (sharded.contains(axis.name)) kept = in_shards(run);
    if (cut.contains(axis.name)) kept = "cut";
    if (axis.size == 1) seen = kept = "-";
    rows.push_back({axis.name, std::to_string(axis.size), seen, kept, ranks_text(ranks, 2)});
    if (!several_hosts) continue;
    const bool is_across = std::find(across.begin(), across.end(), axis.name) != across.end();
    rows.back().insert(rows.back().begin() + 4, axis.size == 1 ? "-" : is_across ? "across" : "within");
  }
  std::string text = wrapped(printable(run.description));
  text += fmt::format("{} rank{}, seen from rank {}\n\n", layout.grid.ranks(),
                      layout.grid.ranks() == 1 ? "" : "s", layout.rank);
  text += table(std::move(rows), {0, 2, 3, 4, 5});
  if (several_hosts) text += wrapped(printable(hosts_text(layout.grid, run.hosts) + "."));
  for (const std::string& said : said_of_hosts(layout.grid, run.hosts))
    text += wrapped(printable(said) + ".");
  const int counting = layout.grid.size(data);
  text += counting == 1
              ? std::string("Targets are counted on the one rank that has them.\n")
              : fmt::format("Targets are counted along {}: {} ranks.\n", words(data, layout.grid), counting);
  if (normalises_by_replica(run.config))
    text += "The loss is the mean of the means of dp_replicate's replicas (loss.normalise_over).\n";
  return text;
}

// Parameters with equal values of these are listed in one table.
struct Kind {
  std::string cuts, copies, summed, sharded;
  auto operator<=>(const Kind&) const = default;
};

std::string parameters_text(const RankLayout& layout) {
  std::vector<Kind> order;
  std::map<Kind, Rows> tables;
  for (const LaidParameter& parameter : layout.parameters) {
    const Kind kind{cuts_text(parameter.placement), words(parameter.sync.copies, layout.grid),
                    words(parameter.sync.summed, layout.grid),
                    words(layout.buckets[parameter.bucket].sharded, layout.grid)};
    if (!tables.contains(kind)) {
      order.push_back(kind);
      tables[kind] = {{"parameter", "whole", "here", "owners", "held", "owned", "bytes"}};
    }
    std::int64_t owned = 0;
    std::vector<int> owners;
    for (const OwnedBy& one : parameter.owners) {
      if (one.rank == layout.rank) owned += one.elements.size();
      owners.push_back(one.rank);
    }
    tables[kind].push_back({parameter.name, shape(parameter.placement.whole_shape),
                            parameter.placement.cuts.empty() ? "whole" : shape(parameter.local_shape),
                            ranks_text(owners, 2), std::to_string(parameter.held.size()),
                            std::to_string(owned), std::to_string(parameter.kept.total())});
  }
  std::string text;
  for (const Kind& kind : order)
    text += fmt::format(
        "\nParameters on rank {}\n  cut along      {}\n  copied along   {}\n  summed along   {}\n"
        "  sharded along  {}\n{}",
        layout.rank, kind.cuts, kind.copies, kind.summed, kind.sharded,
        table(std::move(tables[kind]), {0, 1, 2, 3}));
  return text;
}

std::string buckets_text(const RankLayout& layout) {
  Rows rows{{"bucket", "parameters", "elements", "padding", "held", "owners"}};
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
  return "\n" + table(std::move(rows), {0, 5});
}

std::string totals_text(const RunLayout& run) {
  const RankLayout& layout = run.layout;
  Rows rows{{"bytes", "parameters", "gradients", "masters", "state", "total"}};
  const auto row = [&](std::string head, const PersistentBytes& kept) {
    rows.push_back({std::move(head), std::to_string(kept.parameters), std::to_string(kept.gradients),
                    std::to_string(kept.master), std::to_string(kept.state), std::to_string(kept.total())});
  };
  row("padding", layout.padding);
  row(fmt::format("rank {}", layout.rank), layout.total);
  row("formula", persistent_bytes(run.plan));
  return "\n" + table(std::move(rows), {0}) +
         wrapped(fmt::format("{}, {}", kept_by_formula(run.plan), symbols(run.plan)));
}

// ---- for programs: docs/layout.md has the keys ----

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

// The axes that have several ranks, in the order of the grid.
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
  return document.dump(2, ' ', false, LayoutJson::error_handler_t::replace) + "\n";
}

}  // namespace isograd
