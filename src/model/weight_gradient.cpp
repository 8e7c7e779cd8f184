#include "model/weight_gradient.hpp"

#include <ATen/ATen.h>

#include "comm/gradient_place.hpp"
#include "matmul/product.hpp"

namespace isograd {

at::Tensor weight_gradient(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight) {
  const auto type = dy.scalar_type();
  if ((type == at::kFloat || type == at::kDouble) && weight.scalar_type() == type) {
    const auto place = differentiable::take_gradient_place(weight);
    if (place.memory.defined()) {
      multiply_into(place.memory, dy.t(), x.t(), place.adds);
      return place.memory;
    }
  }
  return product(dy.t(), x.t());
}

}  // namespace isograd
