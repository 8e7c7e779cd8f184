#include "model/weight_gradient.hpp"

#include <ATen/ATen.h>

#include "comm/gradient_place.hpp"
#include "matmul/product.hpp"

namespace isograd {

at::Tensor weight_gradient(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight) {
  const auto type = dy.scalar_type();
  if ((type != at::kFloat && type != at::kDouble) || weight.scalar_type() != type)
    return product(dy.t(), x.t());
  auto [memory, adds] = differentiable::take_gradient_place(weight);
  if (!memory.defined()) return at::mm(dy.t(), x);
  return adds ? memory.addmm_(dy.t(), x) : at::mm_out(memory, dy.t(), x);
}

}  // namespace isograd
