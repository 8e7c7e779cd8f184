// bf16 as the upper half of an fp32.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "kernels/versions.hpp"

namespace isograd::kernels {

struct Bfloat16 {
  std::uint16_t bits = 0;
};

ISOGRAD_ALWAYS_INLINE float to_float(Bfloat16 value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

// Round to nearest, ties to even; every NaN becomes the quiet NaN.
ISOGRAD_ALWAYS_INLINE Bfloat16 to_bfloat16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return {static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded)};
}

// Between stored values and the type that is computed in.
template <typename T>
ISOGRAD_ALWAYS_INLINE auto load(T x) {
  if constexpr (std::is_same_v<T, Bfloat16>)
    return to_float(x);
  else
    return x;
}
template <typename C, typename T>
ISOGRAD_ALWAYS_INLINE void store(C x, T* to) {
  if constexpr (std::is_same_v<T, Bfloat16>)
    *to = to_bfloat16(x);
  else
    *to = x;
}

}  // namespace isograd::kernels
