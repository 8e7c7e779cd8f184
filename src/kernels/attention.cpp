#include "kernels/attention.hpp"

#include <limits>

#include "kernels/exponential.hpp"
#include "kernels/versions.hpp"

namespace isograd::kernels {
namespace {

// A NaN stays NaN.
ISOGRAD_ALWAYS_INLINE float larger(float a, float b) { return a > b || a != a ? a : b; }

ISOGRAD_ALWAYS_INLINE void weights_body(float* scores, std::int64_t stride, std::int64_t rows,
                                        std::int64_t keys, std::int64_t padded, std::int64_t visible,
                                        float scale, float* max, float* sum, float* factor) {
  for (std::int64_t r = 0; r < rows; ++r) {
    float* __restrict row = scores + r * stride;
    const std::int64_t seen = visible + r < keys ? visible + r : keys, whole = seen - seen % kLanes;
    float lanes[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = -std::numeric_limits<float>::infinity();
    for (std::int64_t j = 0; j < whole; j += kLanes)
      for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = larger(row[j + lane], lanes[lane]);
    for (std::int64_t j = whole; j < seen; ++j) lanes[j - whole] = larger(row[j], lanes[j - whole]);
    for (int width = kLanes / 2; width > 0; width /= 2)
      for (int lane = 0; lane < width; ++lane) lanes[lane] = larger(lanes[lane + width], lanes[lane]);
    const float before = max[r], after = larger(lanes[0] * scale, before);
    max[r] = after;
    factor[r] = exponential(before - after);

    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = 0;
    for (std::int64_t j = 0; j < whole; j += kLanes)
      for (int lane = 0; lane < kLanes; ++lane) {
        const float weight = exponential(fused(row[j + lane], scale, -after));
        row[j + lane] = weight;
        lanes[lane] += weight;
      }
    for (std::int64_t j = whole; j < seen; ++j) {
      row[j] = exponential(fused(row[j], scale, -after));
      lanes[j - whole] += row[j];
    }
    for (std::int64_t j = seen; j < padded; ++j) row[j] = 0;
    sum[r] = sum[r] * factor[r] + folded(lanes);
  }
}

ISOGRAD_ALWAYS_INLINE void backward_body(float* weights, float* dweights, std::int64_t keys,
                                         std::int64_t queries, std::int64_t ahead, float scale,
                                         const float* log_sums, const float* mean) {
  for (std::int64_t r = 0; r < keys; ++r) {
    float* __restrict p = weights + r * queries;
    float* __restrict ds = dweights + r * queries;
    for (std::int64_t j = 0; j < queries; j += kLanes)
      for (int lane = 0; lane < kLanes; ++lane) {
        const float weight = exponential(fused(p[j + lane], scale, -log_sums[j + lane]));
        p[j + lane] = weight;
        ds[j + lane] = weight * (ds[j + lane] - mean[j + lane]) * scale;
      }
    const std::int64_t unseen = r - ahead < queries ? r - ahead : queries;
    for (std::int64_t j = 0; j < unseen; ++j) p[j] = ds[j] = 0;
  }
}

}  // namespace

ISOGRAD_VERSIONS(void, attention_weights, weights_body,
                 (float* scores, std::int64_t stride, std::int64_t rows, std::int64_t keys,
                  std::int64_t padded, std::int64_t visible, float scale, float* max, float* sum,
                  float* factor),
                 (scores, stride, rows, keys, padded, visible, scale, max, sum, factor))

ISOGRAD_VERSIONS(void, attention_weights_backward, backward_body,
                 (float* weights, float* dweights, std::int64_t keys, std::int64_t queries,
                  std::int64_t ahead, float scale, const float* log_sums, const float* mean),
                 (weights, dweights, keys, queries, ahead, scale, log_sums, mean))

}  // namespace isograd::kernels
