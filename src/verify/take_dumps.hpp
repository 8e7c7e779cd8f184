// What verify computed, handed out as dumps (VerifyProblem::take_dump).
#pragma once

#include <string>
#include <vector>

#include "isograd/verify.hpp"

namespace isograd {

// Rank 0. The step of one process in fp64 and, unless empty, its gradients in the run's precision.
void take_reference(const VerifyProblem& problem, const StepDump& oracle, const StepDump::Named& alone);

// Rank 0. A layout's step in fp64, and its gradients (in the order of `found`) and figures in the run's
// precision.
void take_layout(const VerifyProblem& problem, const std::string& layout, const StepDump& found,
                 const std::vector<at::Tensor>& rounded, const StepFigures& figures);

}  // namespace isograd
