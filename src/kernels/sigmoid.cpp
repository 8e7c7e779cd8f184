#include "kernels/sigmoid.hpp"

#include "kernels/exponential.hpp"
#include "kernels/versions.hpp"

namespace isograd::kernels {
namespace {

constexpr std::int64_t kTile = 1024;   // values that stay in the first-level cache while anchors pass
constexpr std::int64_t kAnchors = 64;  // their slopes are added in the computing type before they go to fp64

// e^-|z| never overflows, and σ and its slope follow from it without cancellation.
template <typename T>
ISOGRAD_ALWAYS_INLINE T decay(T z) {
  return exponential(z < 0 ? z : -z);
}

template <typename T>
ISOGRAD_ALWAYS_INLINE T sigmoid(T z) {
  const T e = decay(z);
  return (z < 0 ? e : T(1)) / (T(1) + e);
}

template <typename T>
ISOGRAD_ALWAYS_INLINE T slope(T z) {
  const T e = decay(z), one = T(1) + e;
  return e / (one * one);
}

template <typename T>
ISOGRAD_ALWAYS_INLINE void sums_body(const T* values, std::int64_t num_values, const T* anchors,
                                     std::int64_t num_anchors, T scale, double* sums) {
  for (std::int64_t tile = 0; tile < num_values; tile += kTile) {
    const std::int64_t end = tile + kTile < num_values ? tile + kTile : num_values;
    const std::int64_t whole = end - (end - tile) % kLanes;
    for (std::int64_t k = 0; k < num_anchors; ++k) {
      const T anchor = anchors[k];
      double rest = 0;
      for (std::int64_t j = whole; j < end; ++j)
        rest += static_cast<double>(sigmoid((values[j] - anchor) * scale));
      T lanes[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = 0;
      for (std::int64_t j = tile; j < whole; j += kLanes)
        for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += sigmoid((values[j + lane] - anchor) * scale);
      sums[k] += static_cast<double>(folded(lanes)) + rest;
    }
  }
}

template <typename T>
ISOGRAD_ALWAYS_INLINE void slopes_body(const T* values, std::int64_t num_values, const T* anchors,
                                       const T* weights, std::int64_t num_anchors, T scale, double* by_value,
                                       double* by_anchor) {
  T partial[kTile];
  for (std::int64_t tile = 0; tile < num_values; tile += kTile) {
    const std::int64_t size = tile + kTile < num_values ? kTile : num_values - tile;
    const std::int64_t whole = size - size % kLanes;
    const T* of_tile = values + tile;
    for (std::int64_t begin = 0; begin < num_anchors; begin += kAnchors) {
      const std::int64_t end = begin + kAnchors < num_anchors ? begin + kAnchors : num_anchors;
      for (std::int64_t j = 0; j < size; ++j) partial[j] = 0;
      for (std::int64_t k = begin; k < end; ++k) {
        const T anchor = anchors[k], weight = weights[k];
        double rest = 0;
        for (std::int64_t j = whole; j < size; ++j) {
          const T d = slope((of_tile[j] - anchor) * scale);
          partial[j] += weight * d;
          rest += static_cast<double>(d);
        }
        T lanes[kLanes];
        for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = 0;
        for (std::int64_t j = 0; j < whole; j += kLanes) {
          ISOGRAD_INDEPENDENT_ITERATIONS
          for (int lane = 0; lane < kLanes; ++lane) {
            const T d = slope((of_tile[j + lane] - anchor) * scale);
            partial[j + lane] += weight * d;
            lanes[lane] += d;
          }
        }
        by_anchor[k] += static_cast<double>(folded(lanes)) + rest;
      }
      for (std::int64_t j = 0; j < size; ++j) by_value[tile + j] += static_cast<double>(partial[j]);
    }
  }
}

}  // namespace

#define ISOGRAD_FOR_TYPE(T)                                                                               \
  ISOGRAD_VERSIONS(void, sigmoid_sums, sums_body,                                                         \
                   (const T* values, std::int64_t num_values, const T* anchors, std::int64_t num_anchors, \
                    T scale, double* sums),                                                               \
                   (values, num_values, anchors, num_anchors, scale, sums))                               \
  ISOGRAD_VERSIONS(void, sigmoid_slopes, slopes_body,                                                     \
                   (const T* values, std::int64_t num_values, const T* anchors, const T* weights,         \
                    std::int64_t num_anchors, T scale, double* by_value, double* by_anchor),              \
                   (values, num_values, anchors, weights, num_anchors, scale, by_value, by_anchor))
ISOGRAD_FOR_TYPE(float)
ISOGRAD_FOR_TYPE(double)
#undef ISOGRAD_FOR_TYPE

}  // namespace isograd::kernels
