#include "isograd/world.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>
#include <utility>

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

}  // namespace isograd
