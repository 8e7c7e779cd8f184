#include "kernels/transpose.hpp"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "kernels/versions.hpp"

namespace isograd::kernels {
namespace {

// Every element of parts of larger matrices, at each level; the memory around stays unchanged.
TEST(Levels, TransposeAnyShape) {
  const int best = processor_level();
  for (int level = 0; level <= best; ++level) {
    processor_level() = level;
    for (const std::int64_t rows : {0, 1, 7, 8, 9, 16, 37})
      for (const std::int64_t columns : {0, 1, 5, 8, 15, 24, 33}) {
        const std::int64_t from_stride = columns + 3, to_stride = rows + 2;
        std::vector<float> from(rows * from_stride + 1), to((columns + 1) * to_stride, -1);
        std::iota(from.begin(), from.end(), 0.f);
        transpose(from.data(), from_stride, rows, columns, to.data(), to_stride);
        for (std::int64_t c = 0; c <= columns; ++c)
          for (std::int64_t r = 0; r < to_stride; ++r)
            ASSERT_EQ(to[c * to_stride + r], r < rows && c < columns ? from[r * from_stride + c] : -1)
                << rows << " x " << columns << ", level " << level << ", element " << r << ", " << c;
      }
  }
  processor_level() = best;
}

}  // namespace
}  // namespace isograd::kernels
