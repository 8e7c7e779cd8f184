#include "kernels/flat.hpp"

#include <cmath>

#include "kernels/versions.hpp"

namespace isograd::kernels {
namespace {

ISOGRAD_ALWAYS_INLINE float widen(Bfloat16 value) { return to_float(value); }
ISOGRAD_ALWAYS_INLINE float widen(float value) { return value; }
ISOGRAD_ALWAYS_INLINE double widen(double value) { return value; }

template <bool kRound, typename G, typename T>
ISOGRAD_ALWAYS_INLINE void adamw_body(const AdamW& scalars, const G* __restrict gradients,
                                      T* __restrict parameters, T* __restrict first, T* __restrict second,
                                      Bfloat16* __restrict rounded, std::int64_t count) {
  const T scale = static_cast<T>(scalars.gradient_scale), keep = static_cast<T>(scalars.keep);
  const T beta2 = static_cast<T>(scalars.beta2);
  const T new1 = static_cast<T>(1 - scalars.beta1), new2 = static_cast<T>(1 - scalars.beta2);
  const T step = static_cast<T>(scalars.step_size), epsilon = static_cast<T>(scalars.epsilon);
  const T correction = static_cast<T>(scalars.inverse_root_correction);
  for (std::int64_t i = 0; i < count; ++i) {
    const T gradient = scale * widen(gradients[i]);
    const T m = first[i] + new1 * (gradient - first[i]);
    const T v = beta2 * second[i] + new2 * gradient * gradient;
    const T updated = keep * parameters[i] - step * m / (std::sqrt(v) * correction + epsilon);
    first[i] = m;
    second[i] = v;
    parameters[i] = updated;
    if constexpr (kRound) rounded[i] = to_bfloat16(updated);
  }
}

template <bool kMomentum, bool kRound, typename G, typename T>
ISOGRAD_ALWAYS_INLINE void sgd_loop(const Sgd& scalars, const G* __restrict gradients,
                                    T* __restrict parameters, T* __restrict velocity,
                                    Bfloat16* __restrict rounded, std::int64_t count) {
  const T scale = static_cast<T>(scalars.gradient_scale), rate = static_cast<T>(scalars.learning_rate);
  const T momentum = static_cast<T>(scalars.momentum), decay = static_cast<T>(scalars.weight_decay);
  for (std::int64_t i = 0; i < count; ++i) {
    T change = scale * widen(gradients[i]) + decay * parameters[i];
    if constexpr (kMomentum) {
      change = momentum * velocity[i] + change;
      velocity[i] = change;
    }
    const T updated = parameters[i] - rate * change;
    parameters[i] = updated;
    if constexpr (kRound) rounded[i] = to_bfloat16(updated);
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

ISOGRAD_VERSIONS(void, adamw,
                 (const AdamW& scalars, const float* gradients, float* parameters, float* first,
                  float* second, std::int64_t count),
                 (scalars, gradients, parameters, first, second, count),
                 adamw_body<false>(scalars, gradients, parameters, first, second, nullptr, count))
ISOGRAD_VERSIONS(void, adamw,
                 (const AdamW& scalars, const double* gradients, double* parameters, double* first,
                  double* second, std::int64_t count),
                 (scalars, gradients, parameters, first, second, count),
                 adamw_body<false>(scalars, gradients, parameters, first, second, nullptr, count))
ISOGRAD_VERSIONS(void, adamw,
                 (const AdamW& scalars, const float* gradients, float* parameters, float* first,
                  float* second, Bfloat16* rounded, std::int64_t count),
                 (scalars, gradients, parameters, first, second, rounded, count),
                 adamw_body<true>(scalars, gradients, parameters, first, second, rounded, count))
ISOGRAD_VERSIONS(void, adamw,
                 (const AdamW& scalars, const Bfloat16* gradients, float* parameters, float* first,
                  float* second, Bfloat16* rounded, std::int64_t count),
                 (scalars, gradients, parameters, first, second, rounded, count),
                 rounded ? adamw_body<true>(scalars, gradients, parameters, first, second, rounded, count)
                         : adamw_body<false>(scalars, gradients, parameters, first, second, rounded, count))

ISOGRAD_VERSIONS(void, sgd,
                 (const Sgd& scalars, const float* gradients, float* parameters, float* velocity,
                  Bfloat16* rounded, std::int64_t count),
                 (scalars, gradients, parameters, velocity, rounded, count),
                 sgd_body(scalars, gradients, parameters, velocity, rounded, count))
ISOGRAD_VERSIONS(void, sgd,
                 (const Sgd& scalars, const Bfloat16* gradients, float* parameters, float* velocity,
                  Bfloat16* rounded, std::int64_t count),
                 (scalars, gradients, parameters, velocity, rounded, count),
                 sgd_body(scalars, gradients, parameters, velocity, rounded, count))
ISOGRAD_VERSIONS(void, sgd,
                 (const Sgd& scalars, const double* gradients, double* parameters, double* velocity,
                  std::int64_t count),
                 (scalars, gradients, parameters, velocity, count),
                 sgd_body(scalars, gradients, parameters, velocity, nullptr, count))

}  // namespace isograd::kernels
