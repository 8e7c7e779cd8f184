// A forward's matrix products beside its seams, where several ranks hold the matrices of one model together.
#pragma once

#include "isograd/model.hpp"
#include "model/fused.hpp"

namespace isograd {

// x Wᵢᵀ + bᵢ of all `tokens`, of which `stream` may hold some.
inline std::vector<at::Tensor> enter_products(const ModelSeams& seams, const at::Tensor& stream,
                                              std::int64_t tokens, const std::vector<at::Tensor>& weights,
                                              const std::vector<at::Tensor>& biases) {
  if (seams.enter_products) return seams.enter_products(stream, tokens, weights, biases);
  return linears(seams.enter ? seams.enter(stream, tokens) : stream, weights, biases);
}

// x Wᵀ of all ranks' features, for the stream; where there is a leave().
inline at::Tensor product_leave(const ModelSeams& seams, const at::Tensor& x, const at::Tensor& weight) {
  if (seams.product_leave) return seams.product_leave(x, weight);
  return seams.leave(linears(x, {weight}, {at::Tensor()})[0]);
}

}  // namespace isograd
