#include "model/weight_gradient.hpp"

#include <ATen/ATen.h>

#include "comm/gradient_place.hpp"
#include "kernels/matmul/product.hpp"

namespace isograd {

at::Tensor weight_gradient(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight) {
  const auto type = dy.scalar_type();
  // A GPU's products of bf16 can be written in fp32, as they are added up. The CPU's would be rounded first.
  const bool widens = type == at::kBFloat16 && products_widen(dy.device());
  if ((type == at::kFloat || type == at::kDouble || widens) && weight.scalar_type() == type) {
    const auto place = differentiable::take_gradient_place(weight, widens ? at::kFloat : type);
    if (place.memory.defined()) {
      if (widens)
        multiply_widening_into(place.memory, dy.t(), x.t(), place.adds);
      else
        multiply_into(place.memory, dy.t(), x.t(), place.adds);
      return differentiable::gradient_in(place.memory, weight);
    }
  }
  return product(dy.t(), x.t());
}

}  // namespace isograd
