// Matrix products without gradient, by the fastest kernel that LibTorch has for them.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

namespace isograd {

// a bᵀ (+ addend) (+ bias over rows); a [m, k], b [n, k], addend [m, n], bias [n]; a and b may be transposed
// views, addend and bias undefined. On the CPU bf16 by oneDNN, or in fp32 where oneDNN has no bf16 for the
// processor; fp32 as multiplier_of() says; in fp64, of few numbers and on other devices by at::mm.
// Accumulates in fp32 (fp64 for fp64); the same bits run to run with as many threads, from operands that
// begin as far from a multiple of 64 bytes (LibTorch's own tensors: at one).
at::Tensor product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& addend = {},
                   const at::Tensor& bias = {});

// result = a bᵀ, or result += a bᵀ with `adds`; result [m, n] with unit stride. For results that have a
// place, and for groups of tokens, which have as many rows as there happen to be: where multiplier_of() says
// kOneDnn, fp32 products go to the BLAS unless they are so large that oneDNN may prepare itself for a number
// of rows that it has not seen.
void multiply_into(const at::Tensor& result, const at::Tensor& a, const at::Tensor& b, bool adds = false);

// multiply_into() of bf16 operands and an fp32 result, which is not rounded to bf16 on the way. On GPUs,
// where LibTorch has it: products_widen().
void multiply_widening_into(const at::Tensor& result, const at::Tensor& a, const at::Tensor& b, bool adds);
bool products_widen(at::Device device);

// Who multiplies in fp32 on the CPU: LibTorch's BLAS, oneDNN's whole products, or oneDNN's kernel for blocks
// (brgemm.hpp).
enum class Multiplier { kByRule, kBlas, kOneDnn, kBrgemm };

inline constexpr const char* kMultiplierVariable = "ISOGRAD_PRODUCTS";
std::string_view name_of(Multiplier multiplier);  // rule, blas, onednn, brgemm

// What the variable says, kByRule where it is not set; ConfigError
// where it says anything else.
Multiplier multiplier_of_variable();
// The same at the first call, and later what tests and benches write.
Multiplier& multiplier();

// Of product(a, b) in fp32: what multiplier() says; by the rule kBrgemm where LibTorch has it for the
// processor, else kBlas where a's rows are summed over, as in a weight's gradient dyᵀ x, and kOneDnn
// elsewhere. It knows the processor's level, the order of the elements and nothing that is measured, so that
// all ranks, and a run that is resumed, choose alike. `isograd bench product` shows what it costs on a
// processor.
Multiplier multiplier_of(const at::Tensor& a);

// Whether fp32 products go to brgemm: it is chosen, or the rule takes it here.
bool products_by_brgemm();

// The first by at::addmm alone.
namespace naive_twin {
at::Tensor product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& addend = {},
                   const at::Tensor& bias = {});
}

}  // namespace isograd
