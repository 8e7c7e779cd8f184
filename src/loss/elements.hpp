// The elements of a contiguous CPU tensor of logits as the kernels take them.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>

#include "kernels/bfloat16.hpp"

namespace isograd {

static_assert(sizeof(kernels::Bfloat16) == sizeof(at::BFloat16));

// Calls pass(typed pointer to the elements).
template <typename F>
void with_elements(const at::Tensor& logits, F&& pass) {
  void* data = const_cast<void*>(logits.const_data_ptr());
  switch (logits.scalar_type()) {
    case at::kFloat:
      return pass(static_cast<float*>(data));
    case at::kDouble:
      return pass(static_cast<double*>(data));
    default:
      return pass(static_cast<kernels::Bfloat16*>(data));
  }
}

inline double value_of(float x) {
  return x;
}
inline double value_of(double x) {
  return x;
}
inline double value_of(kernels::Bfloat16 x) {
  return kernels::to_float(x);
}

inline std::int64_t rows_per_task(std::int64_t columns) {
  constexpr std::int64_t kTaskElements = 1 << 15;
  return std::max<std::int64_t>(1, kTaskElements / std::max<std::int64_t>(1, columns));
}

}  // namespace isograd
