#include "model/rows.hpp"

#include <cmath>

#include "kernels/softmax.hpp"
#include "kernels/versions.hpp"

namespace isograd::rows {

using kernels::Bfloat16;
using kernels::folded;
using kernels::kLanes;
using kernels::load;
using kernels::processor_level;
using kernels::store;

namespace {

constexpr std::int64_t kTile = 512;  // elements whose exponentials stay in the first-level cache

template <typename T, typename C>
ISOGRAD_ALWAYS_INLINE void norm_body(const T* x, const T* weight, std::int64_t rows, std::int64_t width,
                                     double epsilon, T* y, C* scale) {
  const std::int64_t whole = width - width % kLanes;
  for (std::int64_t t = 0; t < rows; ++t) {
    const T* __restrict row = x + t * width;
    T* __restrict out = y + t * width;
    C lanes[kLanes] = {};
    for (std::int64_t j = 0; j < whole; j += kLanes)
      for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += load(row[j + lane]) * load(row[j + lane]);
    for (std::int64_t j = whole; j < width; ++j) lanes[j - whole] += load(row[j]) * load(row[j]);
    const C factor = C(1) / std::sqrt(folded(lanes) / static_cast<C>(width) + static_cast<C>(epsilon));
    scale[t] = factor;
    for (std::int64_t j = 0; j < width; ++j) store(load(weight[j]) * (load(row[j]) * factor), out + j);
  }
}

template <typename T, typename C>
ISOGRAD_ALWAYS_INLINE void norm_backward_body(const T* dy, const T* x, const T* weight, const C* scale,
                                              const T* residual, std::int64_t rows, std::int64_t width, T* dx,
                                              C* weight_gradient) {
  const std::int64_t whole = width - width % kLanes;
  for (std::int64_t t = 0; t < rows; ++t) {
    const T* __restrict g = dy + t * width;
    const T* __restrict row = x + t * width;
    const C factor = scale[t];
    if (weight_gradient) {
      C* __restrict sums = weight_gradient;
      for (std::int64_t j = 0; j < width; ++j) sums[j] += load(g[j]) * (load(row[j]) * factor);
    }
    if (!dx) continue;
    C lanes[kLanes] = {};
    for (std::int64_t j = 0; j < whole; j += kLanes)
      for (int lane = 0; lane < kLanes; ++lane)
        lanes[lane] += load(g[j + lane]) * load(weight[j + lane]) * load(row[j + lane]);
    for (std::int64_t j = whole; j < width; ++j)
      lanes[j - whole] += load(g[j]) * load(weight[j]) * load(row[j]);
    const C along = folded(lanes) * factor * factor * factor / static_cast<C>(width);
    T* __restrict out = dx + t * width;
    if (residual) {
      const T* __restrict kept = residual + t * width;
      for (std::int64_t j = 0; j < width; ++j)
        store(load(kept[j]) + (factor * (load(weight[j]) * load(g[j])) - along * load(row[j])), out + j);
    } else {
      for (std::int64_t j = 0; j < width; ++j)
        store(factor * (load(weight[j]) * load(g[j])) - along * load(row[j]), out + j);
    }
  }
}

template <typename T, typename C>
ISOGRAD_ALWAYS_INLINE void rotate_body(const T* x, std::int64_t x_stride, const C* cos, const C* sin,
                                       std::int64_t rows, std::int64_t heads, std::int64_t dim, int direction,
                                       T* y) {
  const std::int64_t half = dim / 2;
  const C sign = static_cast<C>(direction);
  for (std::int64_t t = 0; t < rows; ++t) {
    const C* __restrict c = cos + t * half;
    const C* __restrict s = sin + t * half;
    for (std::int64_t head = 0; head < heads; ++head) {
      const T* __restrict from = x + t * x_stride + head * dim;
      T* __restrict to = y + (t * heads + head) * dim;
      for (std::int64_t i = 0; i < half; ++i) {
        const C a = load(from[i]), b = load(from[i + half]), turn = sign * s[i];
        store(a * c[i] - b * turn, to + i);
        store(b * c[i] + a * turn, to + i + half);
      }
    }
  }
}

// 1/(1 + e^−x) through e^−|x|, which cannot overflow.
template <typename C>
ISOGRAD_ALWAYS_INLINE C logistic(C x, C exponential) {
  return (x < 0 ? exponential : C(1)) / (C(1) + exponential);
}

template <typename T, typename C>
ISOGRAD_ALWAYS_INLINE void exponentials(const T* gate, std::int64_t count, C* values) {
  for (std::int64_t i = 0; i < count; ++i) {
    const C x = load(gate[i]);
    values[i] = x < 0 ? x : -x;
  }
  kernels::exp_nonpositive(values, count, values);
}

template <typename T, typename C>
ISOGRAD_ALWAYS_INLINE void swiglu_body(const T* __restrict gate, const T* __restrict up, std::int64_t count,
                                       T* __restrict y) {
  C buffer[kTile];
  for (std::int64_t begin = 0; begin < count; begin += kTile) {
    const std::int64_t n = count - begin < kTile ? count - begin : kTile;
    exponentials(gate + begin, n, buffer);
    for (std::int64_t i = 0; i < n; ++i) {
      const C x = load(gate[begin + i]);
      store(x * logistic(x, buffer[i]) * load(up[begin + i]), y + begin + i);
    }
  }
}

template <typename T, typename C>
ISOGRAD_ALWAYS_INLINE void swiglu_backward_body(const T* __restrict dy, const T* __restrict gate,
                                                const T* __restrict up, std::int64_t count,
                                                T* __restrict dgate, T* __restrict dup) {
  C buffer[kTile];
  for (std::int64_t begin = 0; begin < count; begin += kTile) {
    const std::int64_t n = count - begin < kTile ? count - begin : kTile;
    exponentials(gate + begin, n, buffer);
    for (std::int64_t i = 0; i < n; ++i) {
      const C x = load(gate[begin + i]), g = load(dy[begin + i]), s = logistic(x, buffer[i]);
      store(g * load(up[begin + i]) * (s * (C(1) + x * (C(1) - s))), dgate + begin + i);
      store(g * (x * s), dup + begin + i);
    }
  }
}

}  // namespace

#define ISOGRAD_FOR_TYPE(T, C)                                                                              \
  ISOGRAD_VERSIONS(                                                                                         \
      void, rms_norm, norm_body,                                                                            \
      (const T* x, const T* weight, std::int64_t rows, std::int64_t width, double epsilon, T* y, C* scale), \
      (x, weight, rows, width, epsilon, y, scale))                                                          \
  ISOGRAD_VERSIONS(void, rms_norm_backward, norm_backward_body,                                             \
                   (const T* dy, const T* x, const T* weight, const C* scale, const T* residual,            \
                    std::int64_t rows, std::int64_t width, T* dx, C* weight_gradient),                      \
                   (dy, x, weight, scale, residual, rows, width, dx, weight_gradient))                      \
  ISOGRAD_VERSIONS(void, rotate, rotate_body,                                                               \
                   (const T* x, std::int64_t x_stride, const C* cos, const C* sin, std::int64_t rows,       \
                    std::int64_t heads, std::int64_t dim, int direction, T* y),                             \
                   (x, x_stride, cos, sin, rows, heads, dim, direction, y))                                 \
  ISOGRAD_VERSIONS(void, swiglu, (swiglu_body<T, C>),                                                       \
                   (const T* gate, const T* up, std::int64_t count, T* y), (gate, up, count, y))            \
  ISOGRAD_VERSIONS(void, swiglu_backward, (swiglu_backward_body<T, C>),                                     \
                   (const T* dy, const T* gate, const T* up, std::int64_t count, T* dgate, T* dup),         \
                   (dy, gate, up, count, dgate, dup))
ISOGRAD_FOR_TYPE(double, double)
ISOGRAD_FOR_TYPE(float, float)
ISOGRAD_FOR_TYPE(Bfloat16, float)
#undef ISOGRAD_FOR_TYPE

}  // namespace isograd::rows
