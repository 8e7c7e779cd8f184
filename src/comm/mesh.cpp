#include "isograd/mesh.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>
#include <utility>

#include "isograd/error.hpp"

namespace isograd {

struct Mesh::Impl {
  World world;
  Grid grid;
  std::map<std::pair<std::vector<int>, std::string>, Group> groups{};  // by ranks and use
};

Mesh::Mesh(const World& world, Grid grid) : impl_(std::make_shared<Impl>(Impl{world, std::move(grid)})) {
  if (impl_->grid.ranks() != world.size)
    throw ConfigError({.where = "the mesh of ranks",
                       .found = fmt::format("{} for {} ranks", impl_->grid.text(), world.size),
                       .expected = "sizes that multiply to the number of ranks",
                       .action = fmt::format("Change a size, or start {} ranks", impl_->grid.ranks())});
}

const Grid& Mesh::grid() const {
  return impl_->grid;
}
int Mesh::rank() const {
  return impl_->world.rank;
}
int Mesh::size(const AxisSet& along) const {
  return impl_->grid.size(along);
}
int Mesh::place(const AxisSet& along) const {
  return impl_->grid.place(along, rank());
}
Group Mesh::all() const {
  return impl_->world.group;
}

Group Mesh::along(const AxisSet& axes, const std::string& use) const {
  std::vector<int> ranks = impl_->grid.ranks_along(axes, rank());
  if (ranks.size() == 1) return Group::solo();
  if (use.empty() && static_cast<int>(ranks.size()) == impl_->world.size) return impl_->world.group;
  auto key = std::pair(std::move(ranks), use);
  const auto known = impl_->groups.find(key);
  if (known != impl_->groups.end()) return known->second;
  const std::string name = fmt::format("{}{}{} of rank {}", use, use.empty() ? "" : " over ",
                                       fmt::join(axes, " x "), key.first.front());
  const Group group = impl_->world.subgroup(key.first, name);
  return impl_->groups.emplace(std::move(key), group).first->second;
}

}  // namespace isograd
