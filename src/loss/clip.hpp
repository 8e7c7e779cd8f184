// Which ratios the clip of a policy gradient stops (Schulman et al. 2017, 1707.06347, eq. 7).
#pragma once

#include <ATen/ATen.h>

namespace isograd {

// Where min(r A, clip(r) A) is the second of the two and has no gradient: only where the clip binds in the
// direction that A pushes.
inline at::Tensor clip_binds(const at::Tensor& ratio, const at::Tensor& advantages, double low, double high) {
  return ratio.gt(high).logical_and(advantages.gt(0)).logical_or(ratio.lt(low).logical_and(advantages.lt(0)));
}

}  // namespace isograd
