// Element-wise sum, maximum, ... of several buffers in one fused pass: each element is read once from every
// input, and the result is written to every output. Without torch: the room comm calls it on raw memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace isograd::kernels {

enum class Number : std::uint8_t {
  kFloat64,
  kFloat32,
  kBFloat16,
  kFloat16,
  kInt64,
  kInt32,
  kInt16,
  kInt8,
  kUInt8,
  kBool
};
// kAverage: the sum divided by `count`. kScaledSum: input k is first multiplied by factors[k] (floats only).
// Only PyTorch uses these two. kAnd, kOr and kXor: integers and bool.
enum class Combine : std::uint8_t { kSum, kMax, kMin, kProduct, kAverage, kScaledSum, kAnd, kOr, kXor };

std::size_t bytes_of(Number number);

// Whether this combination supports the numbers.
bool can_combine(Number number, Combine combine);

// outputs[k][i] = inputs[0][i] ∘ inputs[1][i] ∘ ... ∘ inputs[count - 1][i] for begin <= i < end and every k,
// combined in exactly that order, so the bits do not depend on how a caller splits the range. 16-bit floats
// are combined in fp32 and rounded once, to nearest even. Integers wrap; their average is truncated towards
// zero. bool: sum and maximum are or, product and minimum are and. A NaN in any input gives NaN. An output
// may be the same buffer as an input (at the same index); buffers must not overlap otherwise. count >= 1,
// outputs_count >= 0. `factors`: for kScaledSum, one per input.
void reduce_slices(Number number, Combine combine, const void* const* inputs, int count, std::int64_t begin,
                   std::int64_t end, void* const* outputs, int outputs_count,
                   const double* factors = nullptr);

}  // namespace isograd::kernels
