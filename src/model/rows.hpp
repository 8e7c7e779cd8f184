// The memory-bound passes of a block over rows in the CPU's caches: RMSNorm, rotary embedding, SwiGLU.
// Torch-free, single-threaded; a caller with several threads hands out ranges of rows. fp64 and fp32 are
// computed in themselves, bf16 in fp32. A fixed order of summation: the same bits on every processor.
#pragma once

#include <cstdint>

#include "kernels/bfloat16.hpp"

namespace isograd::rows {

// Squared sums of a row are needed again by the backward pass, as 1/√(mean x² + ε) in the computing type.
// y[t, j] = weight[j] · x[t, j] · scale[t]
// Backward: dx = scale·(w∘dy) − x·(scale³/width)·⟨w∘dy, x⟩ (+ residual, where given), and `weight_gradient`
// [width] = Σ_t dy·x·scale over these rows (null: not wanted). `dx` null: not wanted.
#define ISOGRAD_ROWS(T, C)                                                                                \
  void rms_norm(const T* x, const T* weight, std::int64_t rows, std::int64_t width, double epsilon, T* y, \
                C* scale);                                                                                \
  void rms_norm_backward(const T* dy, const T* x, const T* weight, const C* scale, const T* residual,     \
                         std::int64_t rows, std::int64_t width, T* dx, C* weight_gradient);               \
  /* Pairs (x[i], x[i + dim/2]) of each head turn by the row's angle; cos and sin [rows, dim/2]. x has    \
     `x_stride` elements between rows, y is dense. `direction` −1 turns back: the adjoint. */           \
  void rotate(const T* x, std::int64_t x_stride, const C* cos, const C* sin, std::int64_t rows,           \
              std::int64_t heads, std::int64_t dim, int direction, T* y);                                 \
  /* y = silu(gate) · up;  dgate = dy · up · silu'(gate), dup = dy · silu(gate) */                    \
  void swiglu(const T* gate, const T* up, std::int64_t count, T* y);                                      \
  void swiglu_backward(const T* dy, const T* gate, const T* up, std::int64_t count, T* dgate, T* dup);
ISOGRAD_ROWS(double, double)
ISOGRAD_ROWS(float, float)
ISOGRAD_ROWS(kernels::Bfloat16, float)
#undef ISOGRAD_ROWS

}  // namespace isograd::rows
