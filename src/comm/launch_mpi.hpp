// launch_ranks() through mpirun.
#pragma once

#include "isograd/world.hpp"

namespace isograd {

int launch_through_mpirun(const std::vector<std::string>& command, const LaunchOptions& options);

}  // namespace isograd
