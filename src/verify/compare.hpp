// The numbers of a comparison: sums over large tensors, the scale of errors along a direction, bounds and
// grades (DESIGN.md, the three grades).
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "isograd/verify.hpp"

namespace isograd {

using Tensors = std::vector<at::Tensor>;  // by parameter, fp64

// Sums over elements `begin` to `end` of two fp64 tensors a and b of one shape, in one pass over memory; the
// same bits on any number of threads.
struct PairSums {
  double own = 0, other = 0;              // ⟨a, a⟩, ⟨b, b⟩
  double product = 0;                     // ⟨a, b⟩
  double apart = 0;                       // ⟨a − b, a − b⟩
  double along_own = 0, along_other = 0;  // ⟨a − b, a⟩, ⟨a − b, b⟩
};
PairSums pair_sums(const at::Tensor& a, const at::Tensor& b, std::int64_t begin, std::int64_t end);
PairSums pair_sums(const at::Tensor& a, const at::Tensor& b);

// The same over three tensors e, d and v.
struct FitSums {
  double error_direction = 0, direction = 0, error = 0, value = 0;  // ⟨e, d⟩, ⟨d, d⟩, ⟨e, e⟩, ⟨v, v⟩
  double elements = 0;
};
FitSums fit_sums(const at::Tensor& error, const at::Tensor& direction, const at::Tensor& value,
                 std::int64_t begin, std::int64_t end);

double squares(const at::Tensor& tensor);
double squares_apart(const at::Tensor& a, const at::Tensor& b, double factor);  // Σ (a − factor · b)²

// The roots of these, also where a square would over- or underflow.
double norm_of(const at::Tensor& tensor);
double norm_of(const Tensors& tensors);
double norm_of(const std::vector<double>& norms);                              // of all parts together
double distance(const at::Tensor& a, const at::Tensor& b, double factor = 1);  // ‖a − factor · b‖
double missing_in(const Tensors& parts, const at::Tensor& whole);              // ‖Σ parts − whole‖
bool all_finite(const at::Tensor& tensor);

// How far errors lie along a direction, over all parameters together: rounding averages out there.
struct Along {
  double share = 0;    // 0: not at all; 1: as far as the whole direction
  double scatter = 0;  // standard error of `share`, from how much pieces of the parameters differ
};
// Fits errors by a multiple of `direction`. Each parameter is cut into up to 16 pieces; a piece counts by the
// inverse of the mean square of its error, which is at least that of numbers of the size of `values` rounded
// once to a type with unit round-off `unit`. A direction that is zero everywhere: {0, inf}.
Along along(const Tensors& errors, const Tensors& direction, const Tensors& values, double unit);

// E2's test of the scale of the whole gradient: |error| ≤ 4 (u + scatter + alone). Each factor of a gradient
// is rounded once, in the same direction for all elements: four of them are allowed for. `alone`: how far off
// one process is in the same precision (Along::share): a ranking loss, for one, rounds a common factor
// further.
WholeScale test_scale(const Tensors& gradient, const Tensors& reference, double unit, double alone = 0);
bool scale_agrees(const Tensors& gradient, const Tensors& reference, double unit);  // only whether it passes

// The same for one parameter: |error| ≤ allowed + 4 scatter + twice what no scale explains. Errors that its
// elements share count as few, and a few may lie along the gradient by chance: not more than twice as far as
// across it. That covers r² ≤ r, by which a right gradient looks too small against a reference that is itself
// off by a share r of its norm, in no particular direction.
WholeScale test_scale_of_one(const at::Tensor& gradient, const at::Tensor& reference, double unit,
                             double allowed);
bool scale_of_one_agrees(const at::Tensor& gradient, const at::Tensor& reference, double unit,
                         double allowed);

// How many times one process's rounding a run of the same precision may be off.
constexpr double kRoundingFactor = 4;

// The numbers that the bounds of one layout depend on.
struct Bounds {
  double exact = 1e-10;      // E1: ‖g − g64‖ ≤ exact · s
  double unit_roundoff = 0;  // u of the number type that gradients are summed in
  double unit = 0;           // E2: u of the run's precision, in which losses are scaled
  // Loss, norm and clip coefficient of a run in lower precision. In bf16 and fp16 1e-2: one rounding of what
  // scales all of a gradient, or all logits, in bf16 is 0.2 %, and four are allowed (E2's scale). In fp32
  // 1e-4: a sum of n terms, one after another, may be off by n u of itself, 1,700 terms of one micro-batch.
  double figures = 1e-4;
  double sum_length = 1;  // W · G

  double sums() const { return unit_roundoff * std::sqrt(sum_length); }
  // E2. alone_error = ‖g32 − g64‖ / s, g32 the run of one process in the same precision.
  double rounded(double alone_error) const { return kRoundingFactor * alone_error + sums(); }
  double alone_that_allows(double error) const { return (error - sums()) / kRoundingFactor; }
};
// `ranks` and the largest number of micro-batches on a rank, for a run in `dtype`.
Bounds bounds_for(at::ScalarType dtype, int ranks, std::int64_t micro_batches);

// s of each parameter: max(‖g64‖, floor · RMS · √numel). `norms`: ‖g64‖.
constexpr double kFloor = 1e-3;
std::vector<double> error_scales(const Tensors& reference, double floor = kFloor);
std::vector<double> error_scales(const Tensors& reference, const std::vector<double>& norms, double floor);
bool held_to_floor(double norm, double scale);  // s is its floor, not ‖g64‖; also where both are zero

double in_scales(double difference, double scale);  // 0 where there is none; NaN against infinity
// ‖gradient − reference‖ ≤ allowed · scale; both fp64, of one shape.
Comparison compare(const at::Tensor& gradient, const at::Tensor& reference, double scale, double allowed);

// One run of one process is a poor sample of what rounding costs: a parameter's elements share the rounding
// of what lies behind them, so that many may count as few, and over one number one of two runs is more than 4
// times the other in 16 of 100 pairs. Where a parameter exceeds its bound in lower precision alone, one
// process therefore makes the step again up to this many times, each from parameters an ulp away
// (reference.hpp), and the largest error counts: a layout whose error is one more draw of a single number
// exceeds 4 times that in fewer than 2 of a million.
constexpr int kMostDraws = 16;
// With one run, parameters of fewer elements than this are held to the largest error of all of them.
constexpr std::int64_t kMeasurable = 16;

// The figures of a step that are further from the oracle's than rounding explains: than `bounds.exact` of
// themselves or, with `alone`, the figures of one process in the run's precision, than `bounds.figures` of
// themselves and 4 times what that process is off by. Counts must be equal.
std::vector<OtherFigure> figures_off(const StepFigures& figures, const StepFigures& oracle,
                                     const Bounds& bounds, const StepFigures* alone = nullptr);

// Fills in e1, e2, e3 and `passed` from the parameters, the figures and, in a run that is not exact, the
// scale of the whole gradient. `precision` is "fp32", ...
void grade(LayoutVerdict& layout, const StepFigures& oracle, const std::string& precision, bool exact_run,
           const Bounds& bounds, const WholeScale& scale = {});

// A step passes only where an error of scale of this size shows in each parameter (docs/verify.md); of one
// that is held to a floor, an error of that share of the floor.
constexpr double kCoarsest = 0.1;
// "unresolved", where it does not. `action`: what would tell.
std::optional<Finding> diagnose_resolution(const std::vector<ParameterVerdict>& parameters,
                                           const Grade& grade, bool exact, const std::string& action,
                                           double limit = kCoarsest);

// Fills in what a grade finds, from comparisons of all parameters (Grade::uniform_found and the following).
void note_resolution(Grade& grade, const std::vector<ParameterVerdict>& parameters, bool exact);

std::string precision_name(at::ScalarType dtype);

}  // namespace isograd
