// From what two dumps of one step say, and from what happens when it is made again in other circumstances,
// to a name for the mistake. What fits no known mistake is called unknown and given with its numbers; nothing
// is guessed.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "isograd/verify.hpp"

namespace isograd {

AxisSet present(const Grid& grid, AxisSet along);  // those of `along` that the grid has

// The same step in other circumstances. All defaults: exactly the same again.
struct Experiment {
  // Targets that carry loss: as given; equally many in every micro-batch that has any; another, uneven number
  // in each.
  enum class Counts { kAsGiven, kEqual, kUneven } counts = Counts::kAsGiven;
  bool split_micro_batches = false;  // those of several fragments in two: accumulation
  bool one_micro_batch = false;      // each rank's data in one: no accumulation
  bool without_silent = false;       // micro-batches without a target left out
  int empty_rank = -1;               // this rank has no data, nor those that share its samples
  int only_rank = -1;                // the others have none
  int only_micro_batch = -1;         // and this rank has this one alone
  int swapped[2] = {-1, -1};         // these ranks have each other's data
  int only_axis = -1;                // index into StepDump::axes: all ranks along it, the others have size 1
  std::int64_t muted_document = -1;  // sample id: its targets carry no loss
  bool perturbed = false;            // and its tokens are others
  int ranks = 0;                     // 0: as many as there are
  bool without_noise = false;        // no dropout
  bool without_resume = false;       // the run went on instead of being resumed
  bool reference_only = false;       // only RunPair::expected is needed

  std::string text() const;  // "accumulation off", ...
  bool operator==(const Experiment&) const = default;
};

// The run under test, and the same step made by one process or by a trainer that is known to be right.
struct RunPair {
  StepDump found, expected;
  // The gradient of one process in the precision of `found`, for what rounding alone does; empty: not known.
  StepDump::Named alone{};
  // Both say how their targets lie on ranks and micro-batches, and it is not alike: the parts of `expected`
  // are not those of the ranks of `found`.
  bool dealt_otherwise = false;
  // By `alone`, the largest ‖g − g64‖ of further runs of that process (StepDump::rounding); empty: of none.
  std::vector<double> alone_rounding{};
  // What was asked for alone is weighted as a part of the whole step is.
  bool of_whole = false;
};

// Makes the step again; nothing: this cannot be run.
using RunAgain = std::function<std::optional<RunPair>(const Experiment&)>;

// Empty: the pair shows the same step. The first finding names the cause; others follow where several things
// are wrong. ids are those of kDiagnoses, and "unknown".
// `untold` hears of mistakes that this precision does not tell from the right gradient.
std::vector<Finding> diagnose(const RunPair& pair, const RunAgain& again = {},
                              std::vector<std::string>* untold = nullptr);
// The same of a pair that is compared already.
class ComparedStep;
std::vector<Finding> diagnose(ComparedStep& one, const RunAgain& again = {},
                              std::vector<std::string>* untold = nullptr);

struct Diagnosis {
  const char* id;
  const char* meaning;
};
extern const std::vector<Diagnosis> kDiagnoses;
inline constexpr const char* kReductionNotProven = "reduction_not_proven";

// "2", "1/3", "0.70710678": integers and their inverses up to 4096 by name, others as numbers.
std::string ratio_text(double ratio);

}  // namespace isograd
