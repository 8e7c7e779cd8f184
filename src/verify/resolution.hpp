// The resolution of a comparison: how far errors lie along a direction, and the smallest mistake of scale
// that still shows.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "isograd/verify.hpp"
#include "verify/sums.hpp"

namespace isograd {

using Tensors = std::vector<at::Tensor>;  // by parameter, fp64

// How far errors lie along a direction, over all parameters together: rounding averages out there.
struct Along {
  double share = 0;    // 0: not at all; 1: as far as the whole direction
  double scatter = 0;  // standard error of `share`, from how much pieces of the parameters differ
};

// Fits errors by a multiple of `direction`, of the same shapes. Each parameter is cut into up to 16 pieces; a
// piece counts by the inverse of the mean square of its error, which is at least that of numbers of the size
// of `values` rounded once to a type with unit round-off `unit`. A direction that is zero everywhere: {0,
// inf}.
Along along(const Tensors& errors, const Tensors& direction, const Tensors& values, double unit);

// E2's test of the scale of the whole gradient: |error| ≤ 4 (u + scatter + alone). What multiplies a gradient
// is rounded once for each factor, always in the same direction for all elements: four of them are allowed
// for. `alone`: how far off one process is in the same precision (Along::share), where that is known: a loss
// may round a factor of all its elements further, as a ranking loss does.
WholeScale test_scale(const Tensors& gradient, const Tensors& reference, double unit, double alone = 0);
// Only whether it passes.
bool scale_agrees(const Tensors& gradient, const Tensors& reference, double unit);

// As test_scale(), for one parameter: |error| ≤ allowed + 4 scatter + twice what no scale explains. Errors
// that one parameter's elements share count as few, and a few may lie along the gradient by chance: not more
// than twice as far as across it. That covers r² ≤ r, by which a right gradient looks too small against a
// reference that is itself off by a share r of its norm, in no particular direction.
WholeScale test_scale_of_one(const at::Tensor& gradient, const at::Tensor& reference, double unit,
                             double allowed);
bool scale_of_one_agrees(const at::Tensor& gradient, const at::Tensor& reference, double unit,
                         double allowed);

// The smallest δ for which (1 + δ) g or (1 − δ) g is further than `allowed` (a norm) from the reference;
// infinity where the reference is zero.
double smallest_scale_error(const at::Tensor& gradient, const at::Tensor& reference, double allowed);
double smallest_scale_error(const at::Tensor& gradient, const at::Tensor& reference, double allowed,
                            const PairSums& sums);  // of both

// Also where a square would over- or underflow.
double norm_of(const at::Tensor& tensor);
double norm_of(const Tensors& tensors);
double norm_of(const std::vector<double>& norms);                              // of all parts together
double distance(const at::Tensor& a, const at::Tensor& b, double factor = 1);  // ‖a − factor · b‖
double missing_in(const Tensors& parts, const at::Tensor& whole);              // ‖Σ parts − whole‖
bool all_finite(const at::Tensor& tensor);

}  // namespace isograd
