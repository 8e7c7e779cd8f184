// Transposes a matrix, for products that need an operand in the other order.
#pragma once

#include <cstdint>

namespace isograd::kernels {

// to[c · to_stride + r] = from[r · from_stride + c] for r < rows and c < columns; they do not overlap.
void transpose(const float* from, std::int64_t from_stride, std::int64_t rows, std::int64_t columns,
               float* to, std::int64_t to_stride);

}  // namespace isograd::kernels
