#include "kernels/reduce.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "kernels/bfloat16.hpp"
#include "kernels/versions.hpp"

namespace isograd::kernels {
namespace {

// ---- conversion of stored numbers ----
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
  // Moving the 15 magnitude bits into a float's place leaves the exponent short by 112. One exact
  // multiplication corrects normal and subnormal numbers alike.
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

struct Boolean {
  using Stored = std::uint8_t;
  using Value = std::uint8_t;
  static ISOGRAD_ALWAYS_INLINE Value load(Stored x) { return x != 0; }
  static ISOGRAD_ALWAYS_INLINE Stored store(Value x) { return x; }
};

// ---- combination of two numbers ----
template <Combine combine, typename Value>
ISOGRAD_ALWAYS_INLINE Value apply(Value a, Value b) {
  if constexpr (combine == Combine::kAnd) {
    return static_cast<Value>(a & b);
  } else if constexpr (combine == Combine::kOr) {
    return static_cast<Value>(a | b);
  } else if constexpr (combine == Combine::kXor) {
    return static_cast<Value>(a ^ b);
  } else if constexpr (combine == Combine::kMax || combine == Combine::kMin) {
    if constexpr (std::is_integral_v<Value>) {
      return combine == Combine::kMax ? std::max(a, b) : std::min(a, b);
    } else {  // a NaN stays: it is neither greater nor smaller than later values
      const bool taken = combine == Combine::kMax ? b > a : b < a;
      return taken || b != b ? b : a;
    }
  } else if constexpr (std::is_integral_v<Value>) {
    // 16-bit and smaller ones would be promoted to int, whose overflow is undefined.
    using Unsigned = std::conditional_t<sizeof(Value) < 4, std::uint32_t, std::make_unsigned_t<Value>>;
    const auto x = static_cast<Unsigned>(a), y = static_cast<Unsigned>(b);
    return static_cast<Value>(combine == Combine::kProduct ? x * y : x + y);
  } else {
    return combine == Combine::kProduct ? a * b : a + b;
  }
}

template <Combine combine, typename Value>
ISOGRAD_ALWAYS_INLINE Value finish(Value value, int count) {
  if constexpr (combine == Combine::kAverage) return static_cast<Value>(value / static_cast<Value>(count));
  return value;
}

template <Combine combine, typename Value>
ISOGRAD_ALWAYS_INLINE Value begin_with(Value value, const double* factors, int k) {
  if constexpr (combine == Combine::kScaledSum) return value * static_cast<Value>(factors[k]);
  return value;
}

// ---- the passes ----

// Compile-time numbers of inputs and outputs: an all-reduce or reduce-scatter of few ranks stays in
// registers.
template <typename Format, Combine combine, int count, int outputs_count>
ISOGRAD_ALWAYS_INLINE void pass_fixed(const void* const* inputs, std::int64_t begin, std::int64_t end,
                                      void* const* outputs) {
  using Stored = typename Format::Stored;
  const Stored* in[count];
  Stored* out[outputs_count];
  for (int k = 0; k < count; ++k) in[k] = static_cast<const Stored*>(inputs[k]);
  for (int k = 0; k < outputs_count; ++k) out[k] = static_cast<Stored*>(outputs[k]);
  ISOGRAD_INDEPENDENT_ITERATIONS
  for (std::int64_t i = begin; i < end; ++i) {
    auto value = Format::load(in[0][i]);
#pragma GCC unroll 4
    for (int k = 1; k < count; ++k) value = apply<combine>(value, Format::load(in[k][i]));
    const Stored result = Format::store(finish<combine>(value, count));
#pragma GCC unroll 4
    for (int k = 0; k < outputs_count; ++k) out[k][i] = result;
  }
}

// Any numbers of inputs and outputs: one block at a time, which stays in the first-level cache.
template <typename Format, Combine combine>
ISOGRAD_ALWAYS_INLINE void pass_blocked(const void* const* inputs, int count, std::int64_t begin,
                                        std::int64_t end, void* const* outputs, int outputs_count,
                                        const double* factors) {
  using Stored = typename Format::Stored;
  using Value = typename Format::Value;
  constexpr std::int64_t kBlock = 512;
  alignas(64) Value value[kBlock];
  alignas(64) Stored result[kBlock];
  for (std::int64_t base = begin; base < end; base += kBlock) {
    const std::int64_t n = std::min(kBlock, end - base);
    const Stored* first = static_cast<const Stored*>(inputs[0]) + base;
    for (std::int64_t i = 0; i < n; ++i) value[i] = begin_with<combine>(Format::load(first[i]), factors, 0);
    for (int k = 1; k < count; ++k) {
      const Stored* next = static_cast<const Stored*>(inputs[k]) + base;
      for (std::int64_t i = 0; i < n; ++i) {
        value[i] = apply<combine>(value[i], begin_with<combine>(Format::load(next[i]), factors, k));
      }
    }
    for (std::int64_t i = 0; i < n; ++i) result[i] = Format::store(finish<combine>(value[i], count));
    for (int k = 0; k < outputs_count; ++k) {
      std::memcpy(static_cast<Stored*>(outputs[k]) + base, result,
                  static_cast<std::size_t>(n) * sizeof(Stored));
    }
  }
}

template <typename Format, Combine combine>
ISOGRAD_ALWAYS_INLINE void pass(const void* const* inputs, int count, std::int64_t begin, std::int64_t end,
                                void* const* outputs, int outputs_count, const double* factors) {
  // Only the common types get specialised code; the rest goes through blocks. So do 16-bit floats: the
  // compiler vectorises separate loops of conversions, but not loads, sum and stores in one loop.
  if constexpr (std::is_floating_point_v<typename Format::Stored> &&
                (combine == Combine::kSum || combine == Combine::kAverage)) {
    const bool one = outputs_count == 1;
    if (count == 2 && one) return pass_fixed<Format, combine, 2, 1>(inputs, begin, end, outputs);
    if (count == 3 && one) return pass_fixed<Format, combine, 3, 1>(inputs, begin, end, outputs);
    if (count == 4 && one) return pass_fixed<Format, combine, 4, 1>(inputs, begin, end, outputs);
    const bool all = outputs_count == count;
    if (count == 2 && all) return pass_fixed<Format, combine, 2, 2>(inputs, begin, end, outputs);
    if (count == 3 && all) return pass_fixed<Format, combine, 3, 3>(inputs, begin, end, outputs);
    if (count == 4 && all) return pass_fixed<Format, combine, 4, 4>(inputs, begin, end, outputs);
  }
  pass_blocked<Format, combine>(inputs, count, begin, end, outputs, outputs_count, factors);
}

using Pass = void (*)(const void* const*, int, std::int64_t, std::int64_t, void* const*, int, const double*);

constexpr std::size_t kCombines = 9;

// One function per number format and operation, each compiled for several processors.
#define ISOGRAD_PASS(name, format, combine)                                                     \
  ISOGRAD_VERSIONS(void, name, (pass<format, combine>),                                         \
                   (const void* const* inputs, int count, std::int64_t begin, std::int64_t end, \
                    void* const* outputs, int outputs_count, const double* factors),            \
                   (inputs, count, begin, end, outputs, outputs_count, factors))
#define ISOGRAD_COMMON_PASSES(name, format)               \
  ISOGRAD_PASS(sum_##name, format, Combine::kSum)         \
  ISOGRAD_PASS(max_##name, format, Combine::kMax)         \
  ISOGRAD_PASS(min_##name, format, Combine::kMin)         \
  ISOGRAD_PASS(product_##name, format, Combine::kProduct) \
  ISOGRAD_PASS(average_##name, format, Combine::kAverage)
#define ISOGRAD_FLOAT_PASSES(name, format)                                          \
  ISOGRAD_COMMON_PASSES(name, format)                                               \
  ISOGRAD_PASS(scaled_##name, format, Combine::kScaledSum)                          \
  constexpr Pass k_##name[kCombines] = {sum_##name,     max_##name,     min_##name, \
                                        product_##name, average_##name, scaled_##name};
#define ISOGRAD_INTEGER_PASSES(name, format)                                                                \
  ISOGRAD_COMMON_PASSES(name, format)                                                                       \
  ISOGRAD_PASS(and_##name, format, Combine::kAnd)                                                           \
  ISOGRAD_PASS(or_##name, format, Combine::kOr)                                                             \
  ISOGRAD_PASS(xor_##name, format, Combine::kXor)                                                           \
  constexpr Pass k_##name[kCombines] = {sum_##name, max_##name, min_##name, product_##name, average_##name, \
                                        nullptr,    and_##name, or_##name,  xor_##name};

ISOGRAD_FLOAT_PASSES(float64, Plain<double>)
ISOGRAD_FLOAT_PASSES(float32, Plain<float>)
ISOGRAD_FLOAT_PASSES(bfloat16, Brain16)
ISOGRAD_FLOAT_PASSES(float16, Float16)
ISOGRAD_INTEGER_PASSES(int64, Plain<std::int64_t>)
ISOGRAD_INTEGER_PASSES(int32, Plain<std::int32_t>)
ISOGRAD_INTEGER_PASSES(int16, Plain<std::int16_t>)
ISOGRAD_INTEGER_PASSES(int8, Plain<std::int8_t>)
ISOGRAD_INTEGER_PASSES(uint8, Plain<std::uint8_t>)
ISOGRAD_PASS(or_boolean, Boolean, Combine::kOr)
ISOGRAD_PASS(and_boolean, Boolean, Combine::kAnd)
ISOGRAD_PASS(xor_boolean, Boolean, Combine::kXor)
constexpr Pass k_boolean[kCombines] = {or_boolean, or_boolean,  and_boolean, and_boolean, nullptr,
                                       nullptr,    and_boolean, or_boolean,  xor_boolean};

// By Number and Combine; null: no such operation.
struct Kind {
  std::size_t bytes;
  const Pass* passes;
};
constexpr Kind kKinds[] = {{8, k_float64}, {4, k_float32}, {2, k_bfloat16}, {2, k_float16}, {8, k_int64},
                           {4, k_int32},   {2, k_int16},   {1, k_int8},     {1, k_uint8},   {1, k_boolean}};

}  // namespace

std::size_t bytes_of(Number number) { return kKinds[static_cast<std::size_t>(number)].bytes; }

bool can_combine(Number number, Combine combine) {
  return kKinds[static_cast<std::size_t>(number)].passes[static_cast<std::size_t>(combine)] != nullptr;
}

void reduce_slices(Number number, Combine combine, const void* const* inputs, int count, std::int64_t begin,
                   std::int64_t end, void* const* outputs, int outputs_count, const double* factors) {
  const Pass chosen = kKinds[static_cast<std::size_t>(number)].passes[static_cast<std::size_t>(combine)];
  chosen(inputs, count, begin, end, outputs, outputs_count, factors);
}

}  // namespace isograd::kernels
