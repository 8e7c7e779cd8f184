// Mesh, and the placement of its axes on hosts.
#include "isograd/world.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "base/number_ranges.hpp"
#include "base/refuse.hpp"
#include "comm/hosts/meeting.hpp"
#include "isograd/error.hpp"

namespace isograd {

struct Mesh::Impl {
  Group all;
  Grid grid;
  MakeGroup make;
  std::map<std::pair<std::vector<int>, std::string>, Group> groups{};  // by ranks and use
};

Mesh::Mesh(Group all, Grid grid, MakeGroup make)
    : impl_(std::make_shared<Impl>(Impl{std::move(all), std::move(grid), std::move(make)})) {
  const int ranks = impl_->all.size();
  // Grid has checked its own product; here the group has another size.
  if (impl_->grid.ranks() != ranks)
    refuse("the mesh of ranks", fmt::format("{} for {} ranks", impl_->grid.text(), ranks),
           "sizes that multiply to the number of ranks",
           fmt::format("Change a size, or start {} ranks", impl_->grid.ranks()));
}

Mesh::Mesh(const World& world, Grid grid)
    : Mesh(world.group, grid, [world, grid](const std::vector<int>& ranks, const std::string& name) {
        return mesh_subgroup(world, grid, ranks, name);
      }) {}

Mesh::Mesh(Group all) : Mesh(all, data_grid(all.size()), {}) {}

const Grid& Mesh::grid() const { return impl_->grid; }
AxisSet Mesh::data() const { return data_axes(impl_->grid); }
int Mesh::rank() const { return impl_->all.rank(); }
int Mesh::size(const AxisSet& along) const { return impl_->grid.size(along); }
int Mesh::place(const AxisSet& along) const { return impl_->grid.place(along, rank()); }
Group Mesh::all() const { return impl_->all; }

Group Mesh::along(const AxisSet& axes, const std::string& use) const {
  std::vector<int> ranks = impl_->grid.ranks_along(axes, rank());
  const std::string name = fmt::format("{}{}{} of rank {}", use, use.empty() ? "" : " over ",
                                       fmt::join(axes, " x "), ranks.front());
  return made(std::move(ranks), use, name);
}

bool Mesh::has_first_stage() const { return !impl_->grid.has(kStageAxis) || place({kStageAxis}) == 0; }

double Mesh::waited_apart() const {
  double seconds = 0;
  for (const auto& [key, group] : impl_->groups)
    if (!key.second.empty()) seconds += group.traffic().waited_seconds;
  return seconds;
}

Group Mesh::counting() const { return along(data()); }

bool Mesh::contributes() const {
  AxisSet peers = without(impl_->grid.names(), kDataAxes);
  peers.erase(kStageAxis);  // every stage contributes values of its own: only the last one has the loss
  return place(peers) == 0;
}

Group Mesh::among(const std::vector<int>& ranks, const std::string& name) const {
  return made(ranks, {}, name);
}

Group Mesh::made(std::vector<int> ranks, const std::string& use, const std::string& name) const {
  if (ranks.size() == 1) return Group::solo();
  if (use.empty() && static_cast<int>(ranks.size()) == impl_->all.size()) return impl_->all;
  auto key = std::pair(std::move(ranks), use);
  const auto known = impl_->groups.find(key);
  if (known != impl_->groups.end()) return known->second;
  ISOGRAD_INVARIANT(impl_->make, "another group than the only one of this mesh: " + name);
  const Group group = impl_->make(key.first, name);
  return impl_->groups.emplace(std::move(key), group).first->second;
}

// ---- Hosts -----------------------------------------------------------------------------------------------

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
