// Matrix products without gradient, by the fastest kernel that LibTorch has for them.
#pragma once

#include <ATen/core/Tensor.h>

namespace isograd {

// a bᵀ (+ addend) (+ bias over rows); a [m, k], b [n, k], addend [m, n], bias [n]; a and b may be transposed
// views, addend and bias undefined. On the CPU in fp32 and bf16 by oneDNN, which on many processors is twice
// as fast as the BLAS behind at::mm; bf16 in fp32 where oneDNN has no bf16 for the processor; in fp64, for
// few rows and on other devices by at::mm. Accumulates in fp32 (fp64 for fp64); the same bits run to run.
at::Tensor product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& addend = {},
                   const at::Tensor& bias = {});

// result = a bᵀ, or result += a bᵀ with `adds`; result [m, n] with unit stride. For groups of tokens, which
// have as many rows as there happen to be: small fp32 products go to at::mm, because oneDNN would have to
// prepare itself for numbers of rows that it has not seen.
void multiply_into(const at::Tensor& result, const at::Tensor& a, const at::Tensor& b, bool adds = false);

// The first by at::addmm alone.
namespace naive_twin {
at::Tensor product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& addend = {},
                   const at::Tensor& bias = {});
}

}  // namespace isograd
