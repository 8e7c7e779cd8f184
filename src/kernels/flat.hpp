// Fused passes over flat buffers: an optimizer step touches each element once. Without torch,
// single-threaded; a caller with several threads splits the range. Buffers may have any alignment.
#pragma once

#include <cstdint>

#include "kernels/bfloat16.hpp"

namespace isograd::kernels {

// Long squared norms are sums of runs of this many elements, in order: a run stays in the second-level cache
// together with the numbers it was computed from.
inline constexpr std::int64_t kSquaresRun = 1 << 15;

// Σ x² in fp64. A fixed order of summation: the same bits on every processor.
double squared_norm(const float* values, std::int64_t count);
double squared_norm(const double* values, std::int64_t count);
double squared_norm(const Bfloat16* values, std::int64_t count);

// max |x|; 0 for an empty buffer; NaN if any value is NaN.
double max_abs(const float* values, std::int64_t count);
double max_abs(const double* values, std::int64_t count);
double max_abs(const Bfloat16* values, std::int64_t count);

// One AdamW update (Loshchilov & Hutter 2019, in the form of torch.optim.AdamW):
//   g ← gradient_scale · g;  p ← keep · p;  m ← m + (1 − β₁)(g − m);  v ← β₂ v + (1 − β₂) g²
//   p ← p − step_size · m / (√v · inverse_root_correction + ε)
struct AdamW {
  double gradient_scale = 1;  // clip coefficient
  double keep = 1;            // 1 − learning rate · weight decay
  double beta1 = 0.9;
  double beta2 = 0.999;
  double step_size = 0;                // learning rate / (1 − β₁ᵗ)
  double inverse_root_correction = 1;  // 1 / √(1 − β₂ᵗ)
  double epsilon = 1e-8;
};
// `rounded`, not null, takes the roundings of `parameters` in the same pass. bf16 gradients are widened on
// the way.
void adamw(const AdamW& scalars, const float* gradients, float* parameters, float* first, float* second,
           Bfloat16* rounded, std::int64_t count);
void adamw(const AdamW& scalars, const double* gradients, double* parameters, double* first, double* second,
           Bfloat16* rounded, std::int64_t count);
void adamw(const AdamW& scalars, const Bfloat16* gradients, float* parameters, float* first, float* second,
           Bfloat16* rounded, std::int64_t count);

// One SGD update in the form of torch.optim.SGD without dampening:
//   g ← gradient_scale · g + weight_decay · p;  b ← momentum · b + g;  p ← p − learning_rate · b
struct Sgd {
  double gradient_scale = 1;
  double learning_rate = 0;
  double momentum = 0;
  double weight_decay = 0;
};
// `velocity` is null exactly when momentum is 0; `rounded` as above.
void sgd(const Sgd& scalars, const float* gradients, float* parameters, float* velocity, Bfloat16* rounded,
         std::int64_t count);
void sgd(const Sgd& scalars, const Bfloat16* gradients, float* parameters, float* velocity, Bfloat16* rounded,
         std::int64_t count);
void sgd(const Sgd& scalars, const double* gradients, double* parameters, double* velocity, Bfloat16* rounded,
         std::int64_t count);

}  // namespace isograd::kernels
