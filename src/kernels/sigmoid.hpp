// Sums over pairs of logistic sigmoids, tile by tile, for smooth ranks. Without torch, single-threaded, with
// no memory except the results.
#pragma once

#include <cstdint>

namespace isograd::kernels {

// With z = (values[j] − anchors[k]) · scale: sums[k] += Σ_j σ(z). A σ is within 4 units in the last place
// (fp32 and fp64 alike); sums are added up in fp64. `scale` may be negative.
void sigmoid_sums(const float* values, std::int64_t num_values, const float* anchors,
                  std::int64_t num_anchors, float scale, double* sums);
void sigmoid_sums(const double* values, std::int64_t num_values, const double* anchors,
                  std::int64_t num_anchors, double scale, double* sums);

// With the same z and d_kj = σ(z) (1 − σ(z)): by_value[j] += Σ_k weights[k] d_kj and by_anchor[k] += Σ_j
// d_kj.
void sigmoid_slopes(const float* values, std::int64_t num_values, const float* anchors, const float* weights,
                    std::int64_t num_anchors, float scale, double* by_value, double* by_anchor);
void sigmoid_slopes(const double* values, std::int64_t num_values, const double* anchors,
                    const double* weights, std::int64_t num_anchors, double scale, double* by_value,
                    double* by_anchor);

}  // namespace isograd::kernels
