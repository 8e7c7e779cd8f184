// Sums over large tensors, the scale of errors along a direction, bounds and grades (DESIGN.md).
#pragma once

#include <cmath>

#include "isograd/verify.hpp"

namespace isograd {

using Tensors = std::vector<at::Tensor>;  // by parameter, fp64

// Sums over elements [begin, end) of two fp64 tensors, in one pass; the same bits on any number of threads.
struct PairSums {
  double own = 0, other = 0;              // ⟨a, a⟩, ⟨b, b⟩
  double product = 0;                     // ⟨a, b⟩
  double apart = 0;                       // ⟨a − b, a − b⟩
  double along_own = 0, along_other = 0;  // ⟨a − b, a⟩, ⟨a − b, b⟩
};
PairSums pair_sums(const at::Tensor& a, const at::Tensor& b, std::int64_t begin, std::int64_t end);
PairSums pair_sums(const at::Tensor& a, const at::Tensor& b);

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
std::vector<double> norms_of(const Tensors& tensors);
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
// Fits errors by a multiple of `direction` (of zeros: {0, inf}), in up to 16 pieces of each parameter, each
// weighted by the inverse mean square of its error, at least that of one rounding of `values`.
Along along(const Tensors& errors, const Tensors& direction, const Tensors& values, double unit);

// How wrong rounding makes a number that multiplies a whole gradient, relative to it.
struct ScaleRounding {
  double alone = 0;  // by how much one process is off in the same precision (Along::share); inf: not known
  double most = 0;   // of that, as much may count (StepDump::scale_moves); inf: all of it
};

// E2's scale of the whole gradient: |error| ≤ 4 (u + scatter + alone), for up to four roundings that all
// elements share; at most 4 (u + scatter), or 4 `most` where that is more.
WholeScale test_scale(const Tensors& gradient, const Tensors& reference, double unit,
                      const ScaleRounding& rounding = {});
bool scale_agrees(const Tensors& gradient, const Tensors& reference, double unit,
                  const ScaleRounding& rounding = {});  // only whether it passes

// The same for one parameter: |error| ≤ allowed + 4 scatter + twice what no scale explains, because a few
// independent errors may lie along the gradient by chance, and the reference is itself off.
WholeScale test_scale_of_one(const at::Tensor& gradient, const at::Tensor& reference, double unit,
                             double allowed);
bool scale_of_one_agrees(const at::Tensor& gradient, const at::Tensor& reference, double unit,
                         double allowed);

// How many times one process's rounding a run of the same precision may be off.
constexpr double kRoundingFactor = 4;

struct Bounds {
  double exact = 1e-10;      // E1: ‖g − g64‖ ≤ exact · s
  double unit_roundoff = 0;  // u of E2, of the type that gradients are summed in; in dumps it is `unit`
  double unit = 0;           // u₀ of E2, of the run's precision, in which losses are scaled
  // Loss, norm and clip coefficient in lower precision: four roundings of 0.2 % in bf16 and fp16 (1e-2); in
  // fp32 a sum of 1,700 terms, one after another (1e-4).
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

// One run measures rounding badly: over one number, one of two runs is more than 4 times the other in 16 of
// 100 pairs. Where a parameter exceeds its bound, one process makes up to this many steps from parameters an
// ulp away, and the largest error counts: a right layout exceeds 4 times that in fewer than 2 of a million.
constexpr int kMostDraws = 16;
// With one run, parameters of fewer elements than this are held to the largest error of all of them.
constexpr std::int64_t kMeasurable = 16;

// Figures further from the oracle's than `bounds.exact` of themselves or, with `alone` (one process in the
// run's precision), than `bounds.figures` and 4 times what that process is off by. Counts must be equal.
std::vector<OtherFigure> figures_off(const StepFigures& figures, const StepFigures& oracle,
                                     const Bounds& bounds, const StepFigures* alone = nullptr);

// Fills in e1, e2, e3 and `passed`. `e2_bound`: in words; `scale`: of a run that is not exact.
void grade(LayoutVerdict& layout, const StepFigures& oracle, const std::string& e2_bound, bool exact_run,
           const Bounds& bounds, const WholeScale& scale = {});

// A step passes only where an error of scale (or of the floor) of this size shows in each parameter.
constexpr double kCoarsest = 0.1;
// "unresolved", where it does not. `action`: what would tell.
std::optional<Finding> diagnose_resolution(const std::vector<ParameterVerdict>& parameters,
                                           const Grade& grade, bool exact, const std::string& action,
                                           double limit = kCoarsest);

// Fills in what a grade finds, from comparisons of all parameters (Grade::uniform_found and the following).
void note_resolution(Grade& grade, const std::vector<ParameterVerdict>& parameters, bool exact);

}  // namespace isograd
