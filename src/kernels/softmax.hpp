// Rows of logits: log-normaliser and gradient of the cross entropy, without storing probabilities. Without
// torch, single-threaded. bf16 is computed in fp32.
#pragma once

#include <cstdint>

#include "kernels/bfloat16.hpp"

namespace isograd::kernels {

// Σ_j exp(x_j) of one row is sum · exp(maximum), with 1 ≤ sum ≤ vocabulary. NaN in a row makes both or the
// sum NaN.
struct RowSum {
  double maximum = 0;
  double sum = 0;
};

// Computes each row of logits [rows, vocabulary] whose mask is non-zero and leaves the others unchanged. A
// null mask is all ones.
void row_sums(const float* logits, std::int64_t rows, std::int64_t vocabulary, const bool* mask,
              RowSum* sums);
void row_sums(const double* logits, std::int64_t rows, std::int64_t vocabulary, const bool* mask,
              RowSum* sums);
void row_sums(const Bfloat16* logits, std::int64_t rows, std::int64_t vocabulary, const bool* mask,
              RowSum* sums);

// The terms of a row's gradient: factor · exp(x_j − maximum) − uniform − at_target · [j = target]. That of
// scale · cross entropy has factor = scale / sum, uniform = 0 and at_target = scale.
struct RowGradient {
  double maximum = 0;
  double factor = 0;
  double uniform = 0;
  double at_target = 0;
};

// gradient[t, j] for every row: exactly 0 in rows whose mask is zero. A null mask is all ones. A target
// outside [0, vocabulary) is no target, because logits may be a tile of a wider row. `gradient` may be
// `logits` itself.
void softmax_gradient(const float* logits, std::int64_t rows, std::int64_t vocabulary, const bool* mask,
                      const std::int64_t* targets, const RowGradient* of, float* gradient);
void softmax_gradient(const double* logits, std::int64_t rows, std::int64_t vocabulary, const bool* mask,
                      const std::int64_t* targets, const RowGradient* of, double* gradient);
void softmax_gradient(const Bfloat16* logits, std::int64_t rows, std::int64_t vocabulary, const bool* mask,
                      const std::int64_t* targets, const RowGradient* of, Bfloat16* gradient);

// Σ_j x_j of each row whose mask is non-zero. The others are unchanged. A null mask is all ones.
void logit_sums(const float* logits, std::int64_t rows, std::int64_t vocabulary, const bool* mask,
                double* sums);
void logit_sums(const double* logits, std::int64_t rows, std::int64_t vocabulary, const bool* mask,
                double* sums);
void logit_sums(const Bfloat16* logits, std::int64_t rows, std::int64_t vocabulary, const bool* mask,
                double* sums);

// e^x for x ≤ 0 (or NaN) as the rows use it: within 2 units in the last place, 0 where the result would be
// subnormal.
void exp_nonpositive(const float* values, std::int64_t count, float* results);
void exp_nonpositive(const double* values, std::int64_t count, double* results);

}  // namespace isograd::kernels
