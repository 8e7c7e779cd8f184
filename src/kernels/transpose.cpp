#include "kernels/transpose.hpp"

#include <cstring>

#include "kernels/versions.hpp"

namespace isograd::kernels {
namespace {

#if defined(__GNUC__)
constexpr int kEight = 8;

// 8 x 8: exchanges elements of two rows, then pairs, then halves of eight.
ISOGRAD_ALWAYS_INLINE void eight_by_eight(const float* from, std::int64_t from_stride, float* to,
                                          std::int64_t to_stride) {
  using Row = float __attribute__((vector_size(kEight * sizeof(float))));
  Row rows[kEight], pairs[kEight], fours[kEight];
#pragma GCC unroll 8
  for (int i = 0; i < kEight; ++i) std::memcpy(&rows[i], from + i * from_stride, sizeof(Row));
#pragma GCC unroll 4
  for (int i = 0; i < kEight; i += 2) {
    pairs[i] = __builtin_shufflevector(rows[i], rows[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    pairs[i + 1] = __builtin_shufflevector(rows[i], rows[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
#pragma GCC unroll 2
  for (int i = 0; i < kEight; i += 4)
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const Row low = pairs[i + j], high = pairs[i + j + 2];
      fours[i + 2 * j] = __builtin_shufflevector(low, high, 0, 1, 8, 9, 4, 5, 12, 13);
      fours[i + 2 * j + 1] = __builtin_shufflevector(low, high, 2, 3, 10, 11, 6, 7, 14, 15);
    }
#pragma GCC unroll 4
  for (int i = 0; i < kEight / 2; ++i) {
    const Row left = __builtin_shufflevector(fours[i], fours[i + 4], 0, 1, 2, 3, 8, 9, 10, 11),
              right = __builtin_shufflevector(fours[i], fours[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    std::memcpy(to + i * to_stride, &left, sizeof(Row));
    std::memcpy(to + (i + 4) * to_stride, &right, sizeof(Row));
  }
}
#else
constexpr int kEight = 1;

ISOGRAD_ALWAYS_INLINE void eight_by_eight(const float* from, std::int64_t, float* to, std::int64_t) {
  *to = *from;
}
#endif

ISOGRAD_ALWAYS_INLINE void transpose_body(const float* from, std::int64_t from_stride, std::int64_t rows,
                                          std::int64_t columns, float* to, std::int64_t to_stride) {
  const std::int64_t whole_rows = rows - rows % kEight, whole_columns = columns - columns % kEight;
  for (std::int64_t r = 0; r < whole_rows; r += kEight)
    for (std::int64_t c = 0; c < whole_columns; c += kEight)
      eight_by_eight(from + r * from_stride + c, from_stride, to + c * to_stride + r, to_stride);
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = r < whole_rows ? whole_columns : 0; c < columns; ++c)
      to[c * to_stride + r] = from[r * from_stride + c];
}

}  // namespace

ISOGRAD_VERSIONS(void, transpose, transpose_body,
                 (const float* from, std::int64_t from_stride, std::int64_t rows, std::int64_t columns,
                  float* to, std::int64_t to_stride),
                 (from, from_stride, rows, columns, to, to_stride))

}  // namespace isograd::kernels
