// Corresponding groups of a mesh, and their placement on hosts.
#pragma once

#include <string>
#include <vector>

#include "isograd/world.hpp"

namespace isograd {

// Whether the groups that correspond to `ranks` elsewhere in the grid are split among hosts in the same way.
// Their sums are then added in the same order. This fails where a host ends between ranks along tp: one copy
// of a norm weight is summed over data ranks of which two share a host, and the next copy over data ranks of
// which two others do.
bool siblings_split_alike(const Grid& grid, const Hosts& hosts, const std::vector<int>& ranks);

// World::subgroup() of ranks of a mesh. Where corresponding groups are split differently, only MPI carries
// the group. Its order of a sum does not depend on hosts, so copies of one gradient keep the same bits.
Group mesh_subgroup(const World& world, const Grid& grid, const std::vector<int>& ranks,
                    const std::string& name);

}  // namespace isograd
