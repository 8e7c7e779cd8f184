#include "kernels/softmax.hpp"

#include <limits>

#include "kernels/exponential.hpp"
#include "kernels/versions.hpp"

namespace isograd::kernels {
namespace {

constexpr std::int64_t kTile = 1024;  // elements summed in the computing type before they are added in fp64

template <typename T>
using Computing = decltype(load(T{}));

template <typename T>
ISOGRAD_ALWAYS_INLINE RowSum row_sum(const T* row, std::int64_t vocabulary) {
  using C = Computing<T>;
  const std::int64_t whole = vocabulary - vocabulary % kLanes;
  C lanes[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = -std::numeric_limits<C>::infinity();
  for (std::int64_t j = 0; j < whole; j += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) {
      const C x = load(row[j + lane]);
      lanes[lane] = x > lanes[lane] ? x : lanes[lane];
    }
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int lane = 0; lane < width; ++lane)
      lanes[lane] = lanes[lane + width] > lanes[lane] ? lanes[lane + width] : lanes[lane];
  C maximum = lanes[0];
  for (std::int64_t j = whole; j < vocabulary; ++j) {
    const C x = load(row[j]);
    maximum = x > maximum ? x : maximum;
  }

  // The tail skips the lanes: indexed by constants only, they stay in registers.
  double sum = 0;
  for (std::int64_t j = whole; j < vocabulary; ++j) sum += exponential(load(row[j]) - maximum);
  for (std::int64_t tile = 0; tile < whole; tile += kTile) {
    const std::int64_t end = tile + kTile < whole ? tile + kTile : whole;
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = 0;
    for (std::int64_t j = tile; j < end; j += kLanes)
      for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += exponential(load(row[j + lane]) - maximum);
    sum += folded(lanes);
  }
  return {static_cast<double>(maximum), sum};
}

template <typename T>
ISOGRAD_ALWAYS_INLINE void row_sums_body(const T* logits, std::int64_t rows, std::int64_t vocabulary,
                                         const bool* mask, RowSum* sums) {
  for (std::int64_t t = 0; t < rows; ++t)
    if (!mask || mask[t]) sums[t] = row_sum(logits + t * vocabulary, vocabulary);
}

template <typename T>
ISOGRAD_ALWAYS_INLINE void softmax_gradient_body(const T* logits, std::int64_t rows, std::int64_t vocabulary,
                                                 const bool* mask, const std::int64_t* targets,
                                                 const RowGradient* of, T* gradient) {
  using C = Computing<T>;
  for (std::int64_t t = 0; t < rows; ++t) {
    const T* row = logits + t * vocabulary;
    T* out = gradient + t * vocabulary;
    if (mask && !mask[t]) {
      for (std::int64_t j = 0; j < vocabulary; ++j) out[j] = T{};
      continue;
    }
    const C maximum = static_cast<C>(of[t].maximum), factor = static_cast<C>(of[t].factor),
            uniform = static_cast<C>(of[t].uniform);
    const bool has_target = targets[t] >= 0 && targets[t] < vocabulary;
    const C at_target = has_target ? factor * exponential(load(row[targets[t]]) - maximum) -
                                         static_cast<C>(of[t].uniform + of[t].at_target)
                                   : C(0);
    ISOGRAD_INDEPENDENT_ITERATIONS  // out is row itself or does not overlap it
    for (std::int64_t j = 0; j < vocabulary; ++j)
      store(factor * exponential(load(row[j]) - maximum) - uniform, out + j);
    if (has_target) store(at_target, out + targets[t]);
  }
}

template <typename T>
ISOGRAD_ALWAYS_INLINE void logit_sums_body(const T* logits, std::int64_t rows, std::int64_t vocabulary,
                                           const bool* mask, double* sums) {
  for (std::int64_t t = 0; t < rows; ++t) {
    if (mask && !mask[t]) continue;
    const T* row = logits + t * vocabulary;
    const std::int64_t whole = vocabulary - vocabulary % kLanes;
    double lanes[kLanes] = {};
    double sum = 0;
    for (std::int64_t j = whole; j < vocabulary; ++j) sum += load(row[j]);
    for (std::int64_t j = 0; j < whole; j += kLanes)
      for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += load(row[j + lane]);
    sums[t] = sum + folded(lanes);
  }
}

template <typename T>
ISOGRAD_ALWAYS_INLINE void exp_body(const T* values, std::int64_t count, T* results) {
  ISOGRAD_INDEPENDENT_ITERATIONS
  for (std::int64_t i = 0; i < count; ++i) results[i] = exponential(values[i]);
}

}  // namespace

#define ISOGRAD_FOR_TYPE(T)                                                                          \
  ISOGRAD_VERSIONS(                                                                                  \
      void, row_sums, row_sums_body,                                                                 \
      (const T* logits, std::int64_t rows, std::int64_t vocabulary, const bool* mask, RowSum* sums), \
      (logits, rows, vocabulary, mask, sums))                                                        \
  ISOGRAD_VERSIONS(void, softmax_gradient, softmax_gradient_body,                                    \
                   (const T* logits, std::int64_t rows, std::int64_t vocabulary, const bool* mask,   \
                    const std::int64_t* targets, const RowGradient* of, T* gradient),                \
                   (logits, rows, vocabulary, mask, targets, of, gradient))                          \
  ISOGRAD_VERSIONS(                                                                                  \
      void, logit_sums, logit_sums_body,                                                             \
      (const T* logits, std::int64_t rows, std::int64_t vocabulary, const bool* mask, double* sums), \
      (logits, rows, vocabulary, mask, sums))
ISOGRAD_FOR_TYPE(float)
ISOGRAD_FOR_TYPE(double)
ISOGRAD_FOR_TYPE(Bfloat16)
#undef ISOGRAD_FOR_TYPE

ISOGRAD_VERSIONS(void, exp_nonpositive, exp_body, (const float* values, std::int64_t count, float* results),
                 (values, count, results))
ISOGRAD_VERSIONS(void, exp_nonpositive, exp_body, (const double* values, std::int64_t count, double* results),
                 (values, count, results))

}  // namespace isograd::kernels
