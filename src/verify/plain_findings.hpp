// What a layout's numbers say by themselves, beside the diagnosis of its fp64 step.
#pragma once

#include <string>

#include "isograd/verify.hpp"

namespace isograd {

// Graded as passed, every element owned once, every trajectory followed.
bool is_whole(const LayoutVerdict& layout);

// Bits that differ from run to run or over ranks, rounding, updates: added to the layout's findings where
// those do not say it already. `precision` is "fp32", ...; `living`: the layout of a run under way made the
// step in it.
void add_plain_findings(LayoutVerdict& layout, const std::string& precision, bool living);

}  // namespace isograd
