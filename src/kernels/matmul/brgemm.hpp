// fp32 products by LibTorch's brgemm (batch-reduce GEMM), oneDNN's kernel for one block of a product.
#pragma once

#include <cstdint>

namespace isograd {

// Whether LibTorch has brgemm for this processor in fp32 (x86 with AVX2 or more, and oneDNN not held below or
// turned off); elsewhere the functions here compute the same, by its BLAS.
bool has_brgemm();

// Rows of floats: element (i, j) lies at data[i · stride + j].
struct ConstRows {
  const float* data = nullptr;
  std::int64_t stride = 0;
};
struct MutableRows {
  float* data = nullptr;
  std::int64_t stride = 0;
};

// c = a b, or c += a b with `adds`; c [m, n], a [m, k], b [k, n]. One block, all of which should lie in the
// second-level cache. oneDNN makes a kernel (0.2 ms, 20 kB) for each m, n, k, strides and `adds` that a
// thread has not had before, and keeps it: callers let few different ones come (`next_block()`).
void multiply_block(std::int64_t m, std::int64_t n, std::int64_t k, ConstRows a, ConstRows b, MutableRows c,
                    bool adds);

// How much of what is left the next block takes: `block`, or whole `step`s, or the rest, so that sizes that
// vary from step to step (tokens) make block / step + step different kernels at most.
constexpr std::int64_t next_block(std::int64_t left, std::int64_t block, std::int64_t step) {
  return left >= block ? block : left >= step ? left - left % step : left;
}

// A matrix in rows, or turned: element (i, j) at data[j · stride + i].
struct Operand {
  const float* data = nullptr;
  std::int64_t stride = 0;
  bool turned = false;
};

// c = a bᵀ, or c += a bᵀ with `adds`; c [m, n], a [m, k], b [n, k]; on all of LibTorch's threads, with the
// same bits by any number of them.
void multiply_by_brgemm(std::int64_t m, std::int64_t n, std::int64_t k, Operand a, Operand b, MutableRows c,
                        bool adds);

}  // namespace isograd
