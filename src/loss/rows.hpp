// Rows of logits, whole or seen one tile of columns after another: what a first pass finds out about them,
// the losses that follow, and the gradient that a second pass writes. On the CPU by the kernels of
// kernels/softmax.hpp; on other devices, and under `naive_twin`, in plain ATen.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

#include "isograd/group.hpp"

namespace isograd {

// ℓ = cross_entropy · [(1 − ε)(lse − x_target) + ε (lse − mean x)] + z_loss · lse², lse = log Σ_j exp x_j.
struct EntropyLoss {
  double cross_entropy = 1;
  double label_smoothing = 0;  // ε
  double z_loss = 0;
};

// Numbers of each row, in fp64. Rows whose mask is false stay as they began. An undefined mask is all true.
struct RowStatistics {
  at::Tensor sums;     // [T, 2] kernels::RowSum: Σ_j exp(x_j) = sum · exp(maximum)
  at::Tensor target;   // [T] x_target
  at::Tensor total{};  // [T] Σ_j x_j; undefined unless labels are smoothed
};
RowStatistics begin_rows(std::int64_t rows, const EntropyLoss& loss, const at::Device& device);

// Takes in the columns [first_column, first_column + logits.size(1)) of the rows. logits contiguous, targets
// [T] column numbers of the whole row. Columns may all be −inf (a masked vocabulary); a NaN shows.
void take_in(const at::Tensor& logits, std::int64_t first_column, const at::Tensor& targets,
             const at::Tensor& mask, RowStatistics& rows);

// Takes in what the other ranks found in their columns of the same rows. Collective; the same bits on every
// rank. Each target is a column of one rank.
void take_in_columns_of(Group group, RowStatistics& rows);

// lse and −log p_target [T] in fp64, and ℓ of each row; meaningless where the mask was false.
at::Tensor log_sum_exp(const RowStatistics& rows);
at::Tensor negative_log_likelihood(const RowStatistics& rows);
at::Tensor smoothed_cross_entropy(const RowStatistics& rows, double label_smoothing, std::int64_t vocabulary);
at::Tensor losses(const RowStatistics& rows, const EntropyLoss& loss, std::int64_t vocabulary);

// d(Σ_t upstream_t ℓ_t) / dx as four numbers a row, [T, 4] fp64: kernels::RowGradient.
at::Tensor gradient_coefficients(const RowStatistics& rows, const EntropyLoss& loss, std::int64_t vocabulary,
                                 const at::Tensor& upstream);
// The gradient of those columns, into `gradient`, which may be `logits`; exactly 0 where the mask is false.
void write_gradient(const at::Tensor& logits, std::int64_t first_column, const at::Tensor& targets,
                    const at::Tensor& mask, const at::Tensor& coefficients, at::Tensor& gradient);

namespace naive_twin {
void take_in(const at::Tensor& logits, std::int64_t first_column, const at::Tensor& targets,
             const at::Tensor& mask, RowStatistics& rows);
void write_gradient(const at::Tensor& logits, std::int64_t first_column, const at::Tensor& targets,
                    const at::Tensor& mask, const at::Tensor& coefficients, at::Tensor& gradient);
}  // namespace naive_twin

}  // namespace isograd
