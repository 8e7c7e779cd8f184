// Test helper: every operation of c10d::Backend, with inputs and answers that every rank can compute.
#pragma once

#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

namespace isograd::testing {

// Collective. One line for each error; empty when all is right. The backend needs at least two ranks.
std::vector<std::string> check_backend(c10d::Backend& backend);

}  // namespace isograd::testing
