// Groups of a mesh that do the same for other ranks, and how they lie on hosts.
#pragma once

#include <string>
#include <vector>

#include "isograd/world.hpp"

namespace isograd {

// Whether the groups that do for other ranks of the grid what `ranks` do are divided among hosts as these
// are: their sums are then put into the same brackets. Not so where a host ends between ranks along tp: one
// copy of a norm is summed over data ranks of which two share a host, the next over data ranks of which two
// others do.
bool siblings_lie_alike(const Grid& grid, const Hosts& hosts, const std::vector<int>& ranks);

// World::subgroup() of ranks of a mesh. Where siblings lie otherwise, MPI alone carries it, whose order of a
// sum does not depend on hosts: copies of one gradient keep the same bits.
Group mesh_subgroup(const World& world, const Grid& grid, const std::vector<int>& ranks,
                    const std::string& name);

}  // namespace isograd
