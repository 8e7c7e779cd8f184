// e^x for x ≤ 0 in vector code, shared by the kernels that need it.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/versions.hpp"

namespace isograd::kernels {

// Constants of e^x = 2^n · e^r with n = round(x / ln 2), |r| ≤ ln 2 / 2; ln 2 in two parts whose first has
// trailing zeros, so that n · kLn2High is exact (Cody & Waite 1980). The Taylor polynomial's next term is
// below a quarter of a unit in the last place.
template <typename T>
struct Exp;
template <>
struct Exp<float> {
  using Bits = std::uint32_t;
  static constexpr int kMantissa = 23;
  static constexpr Bits kBias = 127;
  static constexpr float kMagic = 0x1.8p23f;  // adding it rounds to an integer, left in the low bits
  static constexpr float kLowest = -87.33f;   // below: subnormal
  static constexpr float kInverseLn2 = 0x1.715476p+0f, kLn2High = 0x1.62ep-1f, kLn2Low = 0x1.0bfbe8p-15f;
  static constexpr float kTaylor[] = {1.f / 5040, 1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 0.5f, 1.f, 1.f};
};
template <>
struct Exp<double> {
  using Bits = std::uint64_t;
  static constexpr int kMantissa = 52;
  static constexpr Bits kBias = 1023;
  static constexpr double kMagic = 0x1.8p52;
  static constexpr double kLowest = -708.39;
  static constexpr double kInverseLn2 = 0x1.71547652b82fep+0, kLn2High = 0x1.62e42fee00000p-1,
                          kLn2Low = 0x1.a39ef35793c76p-33;
  static constexpr double kTaylor[] = {
      1. / 6227020800, 1. / 479001600, 1. / 39916800, 1. / 3628800, 1. / 362880, 1. / 40320, 1. / 5040,
      1. / 720,        1. / 120,       1. / 24,       1. / 6,       0.5,         1.,         1.};
};

// a · b + c rounded once: one instruction with vectors; a slow but equal call on processors without it.
ISOGRAD_ALWAYS_INLINE float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
ISOGRAD_ALWAYS_INLINE double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }

template <typename T>
ISOGRAD_ALWAYS_INLINE T exponential(T x) {
  using E = Exp<T>;
  const T shifted = fused(x, E::kInverseLn2, E::kMagic);
  const T n = shifted - E::kMagic;
  const T r = fused(-n, E::kLn2Low, fused(-n, E::kLn2High, x));
  T value = E::kTaylor[0];
#pragma GCC unroll 16
  for (unsigned k = 1; k < sizeof(E::kTaylor) / sizeof(T); ++k) value = fused(value, r, E::kTaylor[k]);
  const auto power = (std::bit_cast<typename E::Bits>(shifted) + E::kBias) << E::kMantissa;
  value *= std::bit_cast<T>(power);
  return x < E::kLowest ? T(0) : value;  // a NaN stays NaN
}

}  // namespace isograd::kernels
