// Matrix products without gradient, by LibTorch's fastest kernel.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

namespace isograd {

// a bᵀ (+ addend) (+ bias over rows); a [m, k], b [n, k], addend [m, n], bias [n]. a and b may be transposed
// views; addend and bias may be undefined. On the CPU bf16 uses oneDNN, or fp32 where oneDNN has no bf16 for
// the processor; fp32 uses multiplier_of(); fp64, small products and other devices use at::mm. Accumulates in
// fp32 (fp64 for fp64). Every run with the same number of threads gives the same bits, if operands have the
// same offset from a multiple of 64 bytes (LibTorch's own tensors: zero).
at::Tensor product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& addend = {},
                   const at::Tensor& bias = {});

// result = a bᵀ, or result += a bᵀ with `adds`; result [m, n] with unit stride. For results with given
// memory, and for groups of tokens, whose number of rows varies. Where multiplier_of() says kOneDnn, fp32
// products use the BLAS unless they are large enough for oneDNN to prepare for a new number of rows.
void multiply_into(const at::Tensor& result, const at::Tensor& a, const at::Tensor& b, bool adds = false);

// As multiply_into() with bf16 operands and an fp32 result that is never rounded to bf16. On GPUs, where
// LibTorch has it: products_widen().
void multiply_widening_into(const at::Tensor& result, const at::Tensor& a, const at::Tensor& b, bool adds);
bool products_widen(at::Device device);

// The multiplier of fp32 products on the CPU: LibTorch's BLAS, oneDNN's whole products, or oneDNN's kernel
// for blocks (brgemm.hpp).
enum class Multiplier { kByRule, kBlas, kOneDnn, kBrgemm };

inline constexpr const char* kMultiplierVariable = "ISOGRAD_PRODUCTS";
std::string_view name_of(Multiplier multiplier);  // rule, blas, onednn, brgemm

// The variable's multiplier; kByRule if it is not set; ConfigError for other values.
Multiplier multiplier_of_variable();
// The multiplier in use: the variable's at the first call. Tests and benches write it.
Multiplier& multiplier();

// The multiplier of product(a, b) in fp32: that of multiplier(). By the rule it is kBrgemm if LibTorch has it
// for the processor; otherwise kBlas if a's rows are summed over, as in a weight's gradient dyᵀ x, and
// kOneDnn elsewhere. The rule uses only the processor's level and the order of the elements, and nothing that
// is measured, so all ranks and a resumed run choose alike. `isograd bench product` shows its cost on a
// processor.
Multiplier multiplier_of(const at::Tensor& a);

// Whether fp32 products use brgemm: it was chosen, or the rule chooses it here.
bool products_by_brgemm();

// product() by at::addmm alone.
namespace naive_twin {
at::Tensor product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& addend = {},
                   const at::Tensor& bias = {});
}

}  // namespace isograd
