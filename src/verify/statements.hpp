// Plain statements that follow from a verdict's numbers.
#pragma once

#include <string>
#include <vector>

#include "isograd/verify.hpp"

namespace isograd {

// Empty when the layout passed. `ranks` only helps to write a ratio as 1/W.
std::vector<std::string> diagnose(const LayoutVerdict& layout, const StepFigures& oracle, int ranks);

}  // namespace isograd
