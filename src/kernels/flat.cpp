#include "kernels/flat.hpp"

#include <bit>
#include <cmath>

#include "kernels/versions.hpp"

namespace isograd::kernels {
namespace {

template <typename T>
ISOGRAD_ALWAYS_INLINE double squared_norm_body(const T* values, std::int64_t count) {
  double lanes[kLanes] = {};
  const std::int64_t whole = count - count % kLanes;
  for (std::int64_t i = 0; i < whole; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) {
      const double value = load(values[i + lane]);
      lanes[lane] += value * value;
    }
  for (std::int64_t i = whole; i < count; ++i) {
    const double value = load(values[i]);
    lanes[i - whole] += value * value;
  }
  return folded(lanes);
}

// Magnitudes are ordered like their bits, and every NaN is above infinity. Integer comparison keeps NaNs,
// which float comparison would lose.
ISOGRAD_ALWAYS_INLINE std::uint32_t magnitude_bits(float value) {
  return std::bit_cast<std::uint32_t>(value) & 0x7fffffffu;
}
ISOGRAD_ALWAYS_INLINE std::uint64_t magnitude_bits(double value) {
  return std::bit_cast<std::uint64_t>(value) & 0x7fffffffffffffffu;
}
ISOGRAD_ALWAYS_INLINE std::uint16_t magnitude_bits(Bfloat16 value) {
  return static_cast<std::uint16_t>(value.bits & 0x7fffu);
}

template <typename T>
ISOGRAD_ALWAYS_INLINE double max_abs_body(const T* values, std::int64_t count) {
  using Bits = decltype(magnitude_bits(T{}));
  Bits largest = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const Bits bits = magnitude_bits(values[i]);
    largest = bits > largest ? bits : largest;
  }
  return load(std::bit_cast<T>(largest));
}

template <bool kRound, typename G, typename T>
ISOGRAD_ALWAYS_INLINE void adamw_loop(const AdamW& scalars, const G* __restrict gradients,
                                      T* __restrict parameters, T* __restrict first, T* __restrict second,
                                      Bfloat16* __restrict rounded, std::int64_t count) {
  const T scale = static_cast<T>(scalars.gradient_scale), keep = static_cast<T>(scalars.keep);
  const T beta2 = static_cast<T>(scalars.beta2);
  const T new1 = static_cast<T>(1 - scalars.beta1), new2 = static_cast<T>(1 - scalars.beta2);
  const T step = static_cast<T>(scalars.step_size), epsilon = static_cast<T>(scalars.epsilon);
  const T correction = static_cast<T>(scalars.inverse_root_correction);
  for (std::int64_t i = 0; i < count; ++i) {
    const T gradient = scale * load(gradients[i]);
    const T m = first[i] + new1 * (gradient - first[i]);
    const T v = beta2 * second[i] + new2 * gradient * gradient;
    const T updated = keep * parameters[i] - step * m / (std::sqrt(v) * correction + epsilon);
    first[i] = m;
    second[i] = v;
    parameters[i] = updated;
    if constexpr (kRound) rounded[i] = to_bfloat16(static_cast<float>(updated));
  }
}

template <typename G, typename T>
ISOGRAD_ALWAYS_INLINE void adamw_body(const AdamW& scalars, const G* gradients, T* parameters, T* first,
                                      T* second, Bfloat16* rounded, std::int64_t count) {
  if (rounded) return adamw_loop<true>(scalars, gradients, parameters, first, second, rounded, count);
  adamw_loop<false>(scalars, gradients, parameters, first, second, rounded, count);
}

template <bool kMomentum, bool kRound, typename G, typename T>
ISOGRAD_ALWAYS_INLINE void sgd_loop(const Sgd& scalars, const G* __restrict gradients,
                                    T* __restrict parameters, T* __restrict velocity,
                                    Bfloat16* __restrict rounded, std::int64_t count) {
  const T scale = static_cast<T>(scalars.gradient_scale), rate = static_cast<T>(scalars.learning_rate);
  const T momentum = static_cast<T>(scalars.momentum), decay = static_cast<T>(scalars.weight_decay);
  for (std::int64_t i = 0; i < count; ++i) {
    T change = scale * load(gradients[i]) + decay * parameters[i];
    if constexpr (kMomentum) {
      change = momentum * velocity[i] + change;
      velocity[i] = change;
    }
    const T updated = parameters[i] - rate * change;
    parameters[i] = updated;
    if constexpr (kRound) rounded[i] = to_bfloat16(static_cast<float>(updated));
  }
}

template <typename G, typename T>
ISOGRAD_ALWAYS_INLINE void sgd_body(const Sgd& scalars, const G* gradients, T* parameters, T* velocity,
                                    Bfloat16* rounded, std::int64_t count) {
  if (velocity && rounded)
    return sgd_loop<true, true>(scalars, gradients, parameters, velocity, rounded, count);
  if (velocity) return sgd_loop<true, false>(scalars, gradients, parameters, velocity, rounded, count);
  if (rounded) return sgd_loop<false, true>(scalars, gradients, parameters, velocity, rounded, count);
  sgd_loop<false, false>(scalars, gradients, parameters, velocity, rounded, count);
}

}  // namespace

#define ISOGRAD_FOR_TYPE(T)                                                                        \
  ISOGRAD_VERSIONS(double, squared_norm, squared_norm_body, (const T* values, std::int64_t count), \
                   (values, count))                                                                \
  ISOGRAD_VERSIONS(double, max_abs, max_abs_body, (const T* values, std::int64_t count), (values, count))
ISOGRAD_FOR_TYPE(float)
ISOGRAD_FOR_TYPE(double)
ISOGRAD_FOR_TYPE(Bfloat16)
#undef ISOGRAD_FOR_TYPE

#define ISOGRAD_FOR_TYPES(G, T)                                                                            \
  ISOGRAD_VERSIONS(void, adamw, adamw_body,                                                                \
                   (const AdamW& scalars, const G* gradients, T* parameters, T* first, T* second,          \
                    Bfloat16* rounded, std::int64_t count),                                                \
                   (scalars, gradients, parameters, first, second, rounded, count))                        \
  ISOGRAD_VERSIONS(void, sgd, sgd_body,                                                                    \
                   (const Sgd& scalars, const G* gradients, T* parameters, T* velocity, Bfloat16* rounded, \
                    std::int64_t count),                                                                   \
                   (scalars, gradients, parameters, velocity, rounded, count))
ISOGRAD_FOR_TYPES(float, float)
ISOGRAD_FOR_TYPES(double, double)
ISOGRAD_FOR_TYPES(Bfloat16, float)
#undef ISOGRAD_FOR_TYPES

}  // namespace isograd::kernels
