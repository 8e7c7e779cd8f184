// Mesh: the ranks of a world on the axes of a grid, and the groups along them.
#pragma once

#include "isograd/cxx20.hpp"

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "isograd/grid.hpp"
#include "isograd/group.hpp"
#include "isograd/world.hpp"

namespace isograd {

// Copyable; copies share their groups.
class Mesh {
 public:
  // ConfigError unless the grid has as many ranks as the world.
  Mesh(const World& world, Grid grid);
  // The same over groups that the caller makes, of any backend. `make` is called once for a group, on all of
  // its ranks, which are given in ascending order.
  using MakeGroup = std::function<Group(const std::vector<int>& ranks, const std::string& name)>;
  Mesh(Group all, Grid grid, MakeGroup make);
  // All ranks of the group along dp_shard.
  Mesh(Group all);  // NOLINT: where there is one axis, the group says everything

  const Grid& grid() const;
  AxisSet data() const;                   // data_axes() of the grid
  int rank() const;                       // of this rank, in the grid and in the world
  int size(const AxisSet& along) const;   // Grid::size()
  int place(const AxisSet& along) const;  // Grid::place() of this rank
  Group all() const;                      // the world's group

  // The ranks that differ from this one along these axes alone, in ascending order. The first call is
  // collective over them; the group is kept. Along all ranks: the world's own group.
  // A `use` asks for a group apart from others of the same ranks, whose operations need no common order with
  // theirs: attention exchanges within backward, beside the reductions that backward launches.
  Group along(const AxisSet& axes, const std::string& use = {}) const;
  // Seconds that this rank has waited in groups with a use of their own.
  double waited_apart() const;
  // The ranks that see different data: targets, samples and weights are counted over them and nowhere else,
  // since the others hold the same ones.
  Group counting() const;
  // Of the ranks that hold the same data and stage, whether this one is the first: it gives what is to be
  // added up once.
  bool speaks() const;
  // Whether it has the first stage of a pipeline, if there is one.
  bool has_first_stage() const;
  // The group of these ranks, in ascending order, this one among them. Made once, collective over them.
  // `name` appears in its errors.
  Group among(const std::vector<int>& ranks, const std::string& name) const;

 private:
  struct Impl;
  Group made(std::vector<int> ranks, const std::string& use, const std::string& name) const;
  std::shared_ptr<Impl> impl_;
};

}  // namespace isograd
