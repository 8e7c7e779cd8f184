#include "kernels/reduce.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "kernels/bfloat16.hpp"
#include "kernels/versions.hpp"

namespace isograd::kernels {
namespace {

// ---- how a stored number becomes one that can be combined ------------------------------------------------
// Integers are combined as unsigned ones, whose overflow is defined (the same bits as two's complement).
template <typename T>
struct Plain {
  using Stored = T;
  using Value = T;
  static ISOGRAD_ALWAYS_INLINE Value load(Stored x) { return x; }
  static ISOGRAD_ALWAYS_INLINE Stored store(Value x) { return x; }
};

struct Brain16 {
  using Stored = Bfloat16;
  using Value = float;
  static ISOGRAD_ALWAYS_INLINE Value load(Stored x) { return to_float(x); }
  static ISOGRAD_ALWAYS_INLINE Stored store(Value x) { return to_bfloat16(x); }
};

struct Float16 {
  using Stored = std::uint16_t;
  using Value = float;
  // Moving the 15 magnitude bits into a float's place leaves the exponent short by 112: one exact
  // multiplication mends normal and subnormal numbers alike.
  static ISOGRAD_ALWAYS_INLINE Value load(Stored x) {
    const std::uint32_t magnitude = static_cast<std::uint32_t>(x & 0x7fffu) << 13;
    const std::uint32_t sign = static_cast<std::uint32_t>(x & 0x8000u) << 16;
    const auto finite = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
    const std::uint32_t special = magnitude | 0x7f800000u;  // infinity and NaN
    return std::bit_cast<float>(sign | (magnitude >= 0x0f800000u ? special : finite));
  }
  static ISOGRAD_ALWAYS_INLINE Stored store(Value x) {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t sign = (bits >> 16) & 0x8000u;
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    // Below 2^-14 the unit is 2^-24, which is the last bit of numbers in [0.5, 1): adding 0.5 rounds.
    const std::uint32_t small =
        std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    const std::uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    std::uint32_t result = magnitude < 0x38800000u ? small : normal;
    result = magnitude >= 0x477ff000u ? 0x7c00u : result;  // 65520 and more round to infinity
    result = magnitude > 0x7f800000u ? 0x7e00u : result;
    return static_cast<Stored>(sign | result);
  }
};

// ---- how two numbers are combined ------------------------------------------------------------------------
template <Combine combine, typename Value>
ISOGRAD_ALWAYS_INLINE Value apply(Value a, Value b) {
  if constexpr (combine == Combine::kSum) {
    if constexpr (std::is_integral_v<Value>) {
      using Unsigned = std::make_unsigned_t<Value>;
      return static_cast<Value>(static_cast<Unsigned>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b)));
    } else {
      return a + b;
    }
  } else if constexpr (std::is_integral_v<Value>) {
    return combine == Combine::kMax ? std::max(a, b) : std::min(a, b);
  } else {  // a NaN stays: it is neither greater nor smaller than what comes later
    const bool taken = combine == Combine::kMax ? b > a : b < a;
    return taken || b != b ? b : a;
  }
}

// ---- the passes ------------------------------------------------------------------------------------------

// `count` known at compile time and as many outputs as inputs: an all-reduce of few ranks stays in registers.
template <typename Format, Combine combine, int count>
ISOGRAD_ALWAYS_INLINE void pass_fixed(const void* const* inputs, std::int64_t begin, std::int64_t end,
                                      void* const* outputs) {
  using Stored = typename Format::Stored;
  const Stored* in[count];
  Stored* out[count];
  for (int k = 0; k < count; ++k) {
    in[k] = static_cast<const Stored*>(inputs[k]);
    out[k] = static_cast<Stored*>(outputs[k]);
  }
#pragma GCC ivdep
  for (std::int64_t i = begin; i < end; ++i) {
    auto value = Format::load(in[0][i]);
#pragma GCC unroll 4
    for (int k = 1; k < count; ++k) value = apply<combine>(value, Format::load(in[k][i]));
    const Stored result = Format::store(value);
#pragma GCC unroll 4
    for (int k = 0; k < count; ++k) out[k][i] = result;
  }
}

// Any numbers of inputs and outputs: a block at a time, which stays in the first-level cache.
template <typename Format, Combine combine>
ISOGRAD_ALWAYS_INLINE void pass_blocked(const void* const* inputs, int count, std::int64_t begin,
                                        std::int64_t end, void* const* outputs, int outputs_count) {
  using Stored = typename Format::Stored;
  using Value = typename Format::Value;
  constexpr std::int64_t kBlock = 512;
  alignas(64) Value value[kBlock];
  alignas(64) Stored result[kBlock];
  for (std::int64_t base = begin; base < end; base += kBlock) {
    const std::int64_t n = std::min(kBlock, end - base);
    const Stored* first = static_cast<const Stored*>(inputs[0]) + base;
    for (std::int64_t i = 0; i < n; ++i) value[i] = Format::load(first[i]);
    for (int k = 1; k < count; ++k) {
      const Stored* next = static_cast<const Stored*>(inputs[k]) + base;
      for (std::int64_t i = 0; i < n; ++i) value[i] = apply<combine>(value[i], Format::load(next[i]));
    }
    for (std::int64_t i = 0; i < n; ++i) result[i] = Format::store(value[i]);
    for (int k = 0; k < outputs_count; ++k) {
      std::memcpy(static_cast<Stored*>(outputs[k]) + base, result,
                  static_cast<std::size_t>(n) * sizeof(Stored));
    }
  }
}

template <typename Format, Combine combine>
ISOGRAD_ALWAYS_INLINE void pass(const void* const* inputs, int count, std::int64_t begin, std::int64_t end,
                                void* const* outputs, int outputs_count) {
  if (count == 2 && outputs_count == 2) return pass_fixed<Format, combine, 2>(inputs, begin, end, outputs);
  if (count == 3 && outputs_count == 3) return pass_fixed<Format, combine, 3>(inputs, begin, end, outputs);
  if (count == 4 && outputs_count == 4) return pass_fixed<Format, combine, 4>(inputs, begin, end, outputs);
  pass_blocked<Format, combine>(inputs, count, begin, end, outputs, outputs_count);
}

using Pass = void (*)(const void* const*, int, std::int64_t, std::int64_t, void* const*, int);

// One function per number format and operation, each compiled for several processors.
#define ISOGRAD_PASS(name, format, combine)                                                     \
  ISOGRAD_VERSIONS(void, name,                                                                  \
                   (const void* const* inputs, int count, std::int64_t begin, std::int64_t end, \
                    void* const* outputs, int outputs_count),                                   \
                   (inputs, count, begin, end, outputs, outputs_count),                         \
                   (pass<format, combine>(inputs, count, begin, end, outputs, outputs_count)))
#define ISOGRAD_PASSES(name, format)              \
  ISOGRAD_PASS(sum_##name, format, Combine::kSum) \
  ISOGRAD_PASS(max_##name, format, Combine::kMax) \
  ISOGRAD_PASS(min_##name, format, Combine::kMin) \
  constexpr Pass k_##name[3] = {sum_##name, max_##name, min_##name};

ISOGRAD_PASSES(float64, Plain<double>)
ISOGRAD_PASSES(float32, Plain<float>)
ISOGRAD_PASSES(bfloat16, Brain16)
ISOGRAD_PASSES(float16, Float16)
ISOGRAD_PASSES(int64, Plain<std::int64_t>)
ISOGRAD_PASSES(int32, Plain<std::int32_t>)
ISOGRAD_PASSES(uint8, Plain<std::uint8_t>)

}  // namespace

std::size_t bytes_of(Number number) {
  switch (number) {
    case Number::kFloat64:
    case Number::kInt64:
      return 8;
    case Number::kFloat32:
    case Number::kInt32:
      return 4;
    case Number::kBFloat16:
    case Number::kFloat16:
      return 2;
    case Number::kUInt8:
      return 1;
  }
  return 0;
}

void reduce_slices(Number number, Combine combine, const void* const* inputs, int count, std::int64_t begin,
                   std::int64_t end, void* const* outputs, int outputs_count) {
  const auto which = static_cast<std::size_t>(combine);
  const Pass* table = nullptr;
  switch (number) {
    case Number::kFloat64:
      table = k_float64;
      break;
    case Number::kFloat32:
      table = k_float32;
      break;
    case Number::kBFloat16:
      table = k_bfloat16;
      break;
    case Number::kFloat16:
      table = k_float16;
      break;
    case Number::kInt64:
      table = k_int64;
      break;
    case Number::kInt32:
      table = k_int32;
      break;
    case Number::kUInt8:
      table = k_uint8;
      break;
  }
  table[which](inputs, count, begin, end, outputs, outputs_count);
}

namespace {
template <typename T>
struct NumberOf;
template <>
struct NumberOf<double> : std::integral_constant<Number, Number::kFloat64> {};
template <>
struct NumberOf<float> : std::integral_constant<Number, Number::kFloat32> {};
template <>
struct NumberOf<std::int64_t> : std::integral_constant<Number, Number::kInt64> {};
template <>
struct NumberOf<std::int32_t> : std::integral_constant<Number, Number::kInt32> {};
template <>
struct NumberOf<std::uint8_t> : std::integral_constant<Number, Number::kUInt8> {};
}  // namespace

template <typename T>
void sum_slices(const T* const* inputs, int count, std::int64_t begin, std::int64_t end, T* const* outputs,
                int outputs_count) {
  reduce_slices(NumberOf<T>::value, Combine::kSum, reinterpret_cast<const void* const*>(inputs), count, begin,
                end, reinterpret_cast<void* const*>(outputs), outputs_count);
}
template void sum_slices(const double* const*, int, std::int64_t, std::int64_t, double* const*, int);
template void sum_slices(const float* const*, int, std::int64_t, std::int64_t, float* const*, int);
template void sum_slices(const std::int64_t* const*, int, std::int64_t, std::int64_t, std::int64_t* const*,
                         int);
template void sum_slices(const std::int32_t* const*, int, std::int64_t, std::int64_t, std::int32_t* const*,
                         int);
template void sum_slices(const std::uint8_t* const*, int, std::int64_t, std::int64_t, std::uint8_t* const*,
                         int);

}  // namespace isograd::kernels
