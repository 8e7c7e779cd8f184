#include "verify/take_dumps.hpp"

#include "verify/compare.hpp"

namespace isograd {
namespace {

// What holds for the step in any precision.
StepDump in_precision(const StepDump& exact, const std::string& precision) {
  StepDump dump;
  dump.samples = exact.samples;
  dump.counts = exact.counts;
  dump.axes = exact.axes;
  dump.precision = precision;
  return dump;
}

}  // namespace

void take_reference(const VerifyProblem& problem, const StepDump& oracle, const StepDump::Named& alone) {
  if (!problem.take_dump) return;
  StepDump whole = oracle;
  whole.ranks[0].bytes_moved = NAN;  // what the first layout needs says nothing of the others
  problem.take_dump("oracle", whole);
  if (alone.empty()) return;
  StepDump dump = in_precision(oracle, precision_name(problem.dtype));
  dump.figures = {
      .loss = NAN, .targets = oracle.figures.targets, .tokens = oracle.figures.tokens, .norm = NAN};
  dump.figures.clip_coefficient = NAN;
  dump.gradients = alone;
  problem.take_dump("alone", dump);
}

void take_layout(const VerifyProblem& problem, const std::string& layout, const StepDump& found,
                 const std::vector<at::Tensor>& rounded, const StepFigures& figures) {
  if (!problem.take_dump) return;
  problem.take_dump(layout, found);
  if (problem.dtype == at::kDouble) return;
  StepDump dump = in_precision(found, precision_name(problem.dtype));
  dump.figures = figures;
  for (std::size_t i = 0; i < rounded.size(); ++i)
    dump.gradients.emplace_back(found.gradients[i].first, rounded[i]);
  problem.take_dump(layout + ", " + dump.precision, dump);
}

}  // namespace isograd
