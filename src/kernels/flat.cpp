#include "kernels/flat.hpp"

#include <bit>
#include <cstring>
#include <type_traits>

#include "kernels/versions.hpp"

namespace isograd::kernels {
namespace {

ISOGRAD_ALWAYS_INLINE double wide(Bfloat16 value) { return to_float(value); }
ISOGRAD_ALWAYS_INLINE double wide(float value) { return value; }
ISOGRAD_ALWAYS_INLINE double wide(double value) { return value; }

// Independent partial sums, so that the additions of one vector do not wait for those of the last.
constexpr int kLanes = 32;

template <typename T>
ISOGRAD_ALWAYS_INLINE double squared_norm_body(const T* values, std::int64_t count) {
  double lanes[kLanes] = {};
  const std::int64_t whole = count - count % kLanes;
  for (std::int64_t i = 0; i < whole; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) {
      const double value = wide(values[i + lane]);
      lanes[lane] += value * value;
    }
  for (std::int64_t i = whole; i < count; ++i) {
    const double value = wide(values[i]);
    lanes[i - whole] += value * value;
  }
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  return lanes[0];
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
  return wide(std::bit_cast<T>(largest));
}

template <typename T>
ISOGRAD_ALWAYS_INLINE void scale_body(double factor, T* values, std::int64_t count) {
  if constexpr (std::is_same_v<T, Bfloat16>) {
    const float by = static_cast<float>(factor);
    for (std::int64_t i = 0; i < count; ++i) values[i] = to_bfloat16(by * to_float(values[i]));
  } else {
    const T by = static_cast<T>(factor);
    for (std::int64_t i = 0; i < count; ++i) values[i] = by * values[i];
  }
}

ISOGRAD_ALWAYS_INLINE void widen_body(const Bfloat16* __restrict values, float* __restrict result,
                                      std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) result[i] = to_float(values[i]);
}

ISOGRAD_ALWAYS_INLINE void round_body(const float* __restrict values, Bfloat16* __restrict result,
                                      std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) result[i] = to_bfloat16(values[i]);
}

}  // namespace

ISOGRAD_VERSIONS(double, squared_norm, (const float* values, std::int64_t count), (values, count),
                 squared_norm_body(values, count))
ISOGRAD_VERSIONS(double, squared_norm, (const double* values, std::int64_t count), (values, count),
                 squared_norm_body(values, count))
ISOGRAD_VERSIONS(double, squared_norm, (const Bfloat16* values, std::int64_t count), (values, count),
                 squared_norm_body(values, count))

ISOGRAD_VERSIONS(double, max_abs, (const float* values, std::int64_t count), (values, count),
                 max_abs_body(values, count))
ISOGRAD_VERSIONS(double, max_abs, (const double* values, std::int64_t count), (values, count),
                 max_abs_body(values, count))
ISOGRAD_VERSIONS(double, max_abs, (const Bfloat16* values, std::int64_t count), (values, count),
                 max_abs_body(values, count))

ISOGRAD_VERSIONS(void, scale, (double factor, float* values, std::int64_t count), (factor, values, count),
                 scale_body(factor, values, count))
ISOGRAD_VERSIONS(void, scale, (double factor, double* values, std::int64_t count), (factor, values, count),
                 scale_body(factor, values, count))
ISOGRAD_VERSIONS(void, scale, (double factor, Bfloat16* values, std::int64_t count), (factor, values, count),
                 scale_body(factor, values, count))

ISOGRAD_VERSIONS(void, cast, (const Bfloat16* values, float* result, std::int64_t count),
                 (values, result, count), widen_body(values, result, count))
ISOGRAD_VERSIONS(void, cast, (const float* values, Bfloat16* result, std::int64_t count),
                 (values, result, count), round_body(values, result, count))

// Strided access is one load each on every processor, so it needs no versions.
template <typename T>
void pack(const T* source, std::int64_t stride, T* flat, std::int64_t count) {
  if (count <= 0) return;
  if (stride == 1) {
    std::memcpy(flat, source, static_cast<std::size_t>(count) * sizeof(T));
    return;
  }
  for (std::int64_t i = 0; i < count; ++i) flat[i] = source[i * stride];
}

template <typename T>
void unpack(const T* flat, T* target, std::int64_t stride, std::int64_t count) {
  if (count <= 0) return;
  if (stride == 1) {
    std::memcpy(target, flat, static_cast<std::size_t>(count) * sizeof(T));
    return;
  }
  for (std::int64_t i = 0; i < count; ++i) target[i * stride] = flat[i];
}

template void pack(const float*, std::int64_t, float*, std::int64_t);
template void pack(const double*, std::int64_t, double*, std::int64_t);
template void pack(const Bfloat16*, std::int64_t, Bfloat16*, std::int64_t);
template void unpack(const float*, float*, std::int64_t, std::int64_t);
template void unpack(const double*, double*, std::int64_t, std::int64_t);
template void unpack(const Bfloat16*, Bfloat16*, std::int64_t, std::int64_t);

}  // namespace isograd::kernels
