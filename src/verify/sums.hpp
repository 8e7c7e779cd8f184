// Sums over the elements of large tensors: one pass over memory, nothing in between written down, on all
// threads; the same bits whatever their number.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace isograd {

// Sums over two vectors a and b, and a − b.
struct PairSums {
  double own = 0, other = 0;              // ⟨a, a⟩, ⟨b, b⟩
  double product = 0;                     // ⟨a, b⟩
  double apart = 0;                       // ⟨a − b, a − b⟩
  double along_own = 0, along_other = 0;  // ⟨a − b, a⟩, ⟨a − b, b⟩
};
// The sums over elements `begin` to `end` of two fp64 tensors of one shape.
PairSums pair_sums(const at::Tensor& a, const at::Tensor& b, std::int64_t begin, std::int64_t end);
PairSums pair_sums(const at::Tensor& a, const at::Tensor& b);

// Sums over three vectors e, d and v.
struct FitSums {
  double error_direction = 0, direction = 0, error = 0, value = 0;  // ⟨e, d⟩, ⟨d, d⟩, ⟨e, e⟩, ⟨v, v⟩
  double elements = 0;
};
FitSums fit_sums(const at::Tensor& error, const at::Tensor& direction, const at::Tensor& value,
                 std::int64_t begin, std::int64_t end);

// Σ (a − factor · b)².
double squares_apart(const at::Tensor& a, const at::Tensor& b, double factor);
// Σ (Σ_c parts[c] − whole)²: what is missing in the parts.
double squares_missing(const at::Tensor& whole, const std::vector<at::Tensor>& parts);
double squares(const at::Tensor& tensor);

// Between these a sum of squares has neither overflown nor lost anything but what is far below its last bit.
bool holds(double squares);

}  // namespace isograd
