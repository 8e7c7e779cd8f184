// Mesh: the ranks of a world on the axes of a grid, and the groups along them.
#pragma once

#include <memory>
#include <string>

#include "isograd/grid.hpp"
#include "isograd/group.hpp"
#include "isograd/world.hpp"

namespace isograd {

// Copyable; copies share their groups.
class Mesh {
 public:
  // ConfigError unless the grid has as many ranks as the world.
  Mesh(const World& world, Grid grid);

  const Grid& grid() const;
  int rank() const;                            // of this rank, in the grid and in the world
  int size(const AxisSet& along) const;        // Grid::size()
  int place(const AxisSet& along) const;       // Grid::place() of this rank
  Group all() const;                           // the world's group

  // The ranks that differ from this one along these axes alone, in ascending order. The first call is
  // collective over them; the group is kept. Along all ranks: the world's own group.
  // A `use` asks for a group apart from others of the same ranks, whose operations need no common order with
  // theirs: attention exchanges within backward, beside the reductions that backward launches.
  Group along(const AxisSet& axes, const std::string& use = {}) const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace isograd
