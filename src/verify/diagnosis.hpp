// Plain statements that follow from a verdict's numbers. What does not fit a statement is reported as unknown
// with the numbers; nothing is guessed.
#pragma once

#include <string>
#include <vector>

#include "isograd/verify.hpp"

namespace isograd {

// Empty when the layout passed. `ranks` only helps to write a ratio as 1/W.
std::vector<std::string> diagnose(const LayoutVerdict& layout, const StepFigures& oracle, int ranks);

// "2", "1/3", "0.70710678": integers and their inverses up to 4096 by name, others as numbers.
std::string ratio_text(double ratio);

}  // namespace isograd
