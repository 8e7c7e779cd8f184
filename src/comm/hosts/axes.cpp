// Placement of axes on hosts, and the text for axes that cross hosts.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>

#include "base/number_ranges.hpp"
#include "base/refuse.hpp"
#include "comm/hosts/meeting.hpp"
#include "isograd/error.hpp"
#include "isograd/world.hpp"

namespace isograd {
namespace {

int host_of(const Hosts& hosts, int rank) { return hosts.of_rank[static_cast<std::size_t>(rank)]; }

// The first two ranks on different hosts that differ only along these axes.
std::optional<std::pair<int, int>> pair_across(const Grid& grid, const Hosts& hosts, const AxisSet& along) {
  for (int rank = 0; rank < grid.ranks(); ++rank)
    for (const int other : grid.ranks_along(along, rank))
      if (host_of(hosts, other) != host_of(hosts, rank)) return std::pair(rank, other);
  return std::nullopt;
}

void check(const Grid& grid, const Hosts& hosts) {
  ISOGRAD_INVARIANT(static_cast<int>(hosts.of_rank.size()) == grid.ranks(),
                    fmt::format("hosts of {} ranks for {}", hosts.of_rank.size(), grid.text()));
}

}  // namespace

Hosts planned_hosts(int ranks, int hosts) {
  if (hosts < 1 || hosts > ranks)
    refuse(fmt::format("{} hosts", hosts), fmt::format("{} rank{}", ranks, ranks == 1 ? "" : "s"),
           "at least one host, and a rank for each", "Plan more ranks or fewer hosts");
  Hosts planned{{}, {}};
  const auto sizes = split_rows(ranks, hosts);
  for (int host = 0; host < hosts; ++host) {
    planned.names.push_back(fmt::format("host{}", host));
    planned.of_rank.insert(planned.of_rank.end(),
                           static_cast<std::size_t>(sizes[static_cast<std::size_t>(host)]), host);
  }
  return planned;
}

std::vector<std::string> axes_across(const Grid& grid, const Hosts& hosts) {
  check(grid, hosts);
  std::vector<std::string> across;
  if (hosts.count() == 1) return across;
  for (const Axis& axis : grid.axes())
    if (pair_across(grid, hosts, {axis.name})) across.push_back(axis.name);
  return across;
}

std::vector<std::string> said_of_hosts(const Grid& grid, const Hosts& hosts) {
  check(grid, hosts);
  std::vector<std::string> said;
  if (hosts.count() == 1) return said;
  const auto say = [&](const std::string& axis, const std::string& what, const std::string& action) {
    if (!grid.has(axis) || grid.size({axis}) == 1) return;
    const auto pair = pair_across(grid, hosts, {axis});
    if (!pair) return;
    const auto name = [&](int rank) { return hosts.names[static_cast<std::size_t>(host_of(hosts, rank))]; };
    said.push_back(fmt::format("{} crosses hosts (rank {} on {}, rank {} on {}): {}; {}", axis, pair->first,
                               name(pair->first), pair->second, name(pair->second), what, action));
  };
  const std::string neighbours = "give each host neighbouring ranks and a number of them that it divides";
  say("tp", "activations leave the host in every layer", neighbours);
  say("cp_ulysses", "attention's heads leave the host in every layer", neighbours);
  say("cp_ring", "keys and values leave the host in every layer", neighbours);
  say("ep", "tokens leave the host in every layer of experts", neighbours);
  if (grid.has("dp_replicate") && grid.size({"dp_replicate"}) == 1)
    say("dp_shard", "each host needs the others' shards",
        fmt::format("parallel.replicas = {}, where the shards of one host fit, sends gradients alone",
                    hosts.count()));
  return said;
}

bool siblings_split_alike(const Grid& grid, const Hosts& hosts, const std::vector<int>& ranks) {
  check(grid, hosts);
  AxisSet varied;  // the axes along which these ranks differ
  for (const Axis& axis : grid.axes())
    for (const int rank : ranks)
      if (grid.place({axis.name}, rank) != grid.place({axis.name}, ranks.front())) varied.insert(axis.name);
  // The hosts of the corresponding ranks elsewhere in the grid, numbered in order of appearance.
  const auto division = [&](int elsewhere) {
    const std::vector<int> line = grid.ranks_along(varied, elsewhere);
    std::vector<int> seen, numbers;
    for (const int rank : ranks) {
      const int host = host_of(hosts, line[static_cast<std::size_t>(grid.place(varied, rank))]);
      const auto found = std::ranges::find(seen, host);
      numbers.push_back(static_cast<int>(found - seen.begin()));
      if (found == seen.end()) seen.push_back(host);
    }
    return numbers;
  };
  const std::vector<int> own = division(ranks.front());
  for (int rank = 0; rank < grid.ranks(); ++rank)
    if (division(rank) != own) return false;
  return true;
}

std::string hosts_text(const Grid& grid, const Hosts& hosts) {
  check(grid, hosts);
  if (hosts.count() == 1) return {};
  std::vector<std::string> who;
  for (int host = 0; host < hosts.count(); ++host) {
    std::vector<int> ranks;
    for (int rank = 0; rank < grid.ranks(); ++rank)
      if (host_of(hosts, rank) == host) ranks.push_back(rank);
    who.push_back(fmt::format("{}: rank{} {}", hosts.names[static_cast<std::size_t>(host)],
                              ranks.size() == 1 ? "" : "s", fmt::join(number_ranges(ranks), ", ")));
  }
  const auto across = axes_across(grid, hosts);
  std::vector<std::string> within;
  for (const Axis& axis : grid.axes())
    if (axis.size > 1 && std::ranges::find(across, axis.name) == across.end()) within.push_back(axis.name);
  std::string text = fmt::format("{} hosts ({})", hosts.count(), fmt::join(who, "; "));
  if (!across.empty()) text += fmt::format(", across: {}", fmt::join(across, ", "));
  if (!within.empty()) text += fmt::format(", within: {}", fmt::join(within, ", "));
  return text;
}

}  // namespace isograd
