// fp32 products by LibTorch's brgemm (batch-reduce GEMM), oneDNN's kernel for one block of a product.
#pragma once

#include <cstdint>

namespace isograd {

// Whether LibTorch has brgemm for this processor in fp32 (x86 with AVX2 or more, and oneDNN neither limited
// nor disabled). Otherwise the functions here compute the same by its BLAS.
bool has_brgemm();

// Rows of floats: element (i, j) is data[i · stride + j].
struct ConstRows {
  const float* data = nullptr;
  std::int64_t stride = 0;
};
struct MutableRows {
  float* data = nullptr;
  std::int64_t stride = 0;
};

// c = a b, or c += a b with `adds`; c [m, n], a [m, k], b [k, n]. One block, which should fit into the
// second-level cache. oneDNN makes and keeps a kernel (0.2 ms, 20 kB) for each new m, n, k, strides and
// `adds` of a thread, so callers use few different ones (`next_block()`).
void multiply_block(std::int64_t m, std::int64_t n, std::int64_t k, ConstRows a, ConstRows b, MutableRows c,
                    bool adds);

// The size of the next block: `block`, or a multiple of `step`, or the rest. So sizes that vary from step to
// step (tokens) make at most block / step + step different kernels.
constexpr std::int64_t next_block(std::int64_t left, std::int64_t block, std::int64_t step) {
  return left >= block ? block : left >= step ? left - left % step : left;
}

// A matrix in rows, or transposed: element (i, j) is data[j · stride + i].
struct Operand {
  const float* data = nullptr;
  std::int64_t stride = 0;
  bool turned = false;
};

// c = a bᵀ, or c += a bᵀ with `adds`; c [m, n], a [m, k], b [n, k]. Uses all of LibTorch's threads; the bits
// do not depend on their number.
void multiply_by_brgemm(std::int64_t m, std::int64_t n, std::int64_t k, Operand a, Operand b, MutableRows c,
                        bool adds);

}  // namespace isograd
