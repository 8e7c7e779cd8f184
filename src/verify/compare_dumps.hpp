// Two dumps of one step, of any trainer: the table, the grade and the diagnosis that verify gives.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "isograd/verify.hpp"
#include "verify/diagnosis.hpp"

namespace isograd {

struct DumpNames {
  std::string found, expected;
};

struct DumpComparison {
  Verdict verdict;  // one layout, named after `found`
  std::vector<Finding> findings;
  std::vector<std::string> notices;  // what was done to the dumps before they were compared
};

// `found` against `expected`, the step of one process or of a trainer that is known to be right. Both in
// fp64: E1. Otherwise E2; with `alone`, the step of one process in the precision of `found`, with its bound,
// and without it with what right steps were seen to be off (Allowance). Nothing is claimed of what a dump
// does not record; whatever is found wrong fails the verdict. ConfigError unless `alone` has the parameters
// of `expected`, in fp64 there.
DumpComparison compare_dumps(StepDump found, StepDump expected, const DumpNames& names,
                             std::optional<StepDump> alone = {});

// A step made again from what a dump recorded of it: single micro-batches from `shares`. Empty without any.
RunAgain again_from_shares(const StepDump& expected);

}  // namespace isograd
