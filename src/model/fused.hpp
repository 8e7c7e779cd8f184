// The differentiable pieces of a block. On the CPU, and on GPUs where there are kernels for them (gpu/), each
// is one pass over memory or one matrix product; else, and under `naive_twin`, plain ATen. A second
// derivative throws.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace isograd {

// weight ∘ x / √(mean x² + ε) over the last dim; x [..., width], weight [width]. Low precision is computed in
// fp32 (Zhang & Sennrich 2019).
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double epsilon);

// The same, and x itself: the backward pass then adds the gradients of both uses of x in one go.
std::pair<at::Tensor, at::Tensor> rms_norm_and_residual(const at::Tensor& x, const at::Tensor& weight,
                                                        double epsilon);

// Rotary embedding of half-split pairs (Su et al. 2021; the layout of Hugging Face's Llama). x [T, heads,
// dim]; cos and sin [T, dim/2] in fp64 for fp64, else in fp32; no gradient for them.
at::Tensor rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);

// silu(gate) ∘ up (Shazeer 2020).
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

// Several projections of one x [T, in]: x Wᵢᵀ + bᵢ, weights [outᵢ, in]; an undefined bias is none.
std::vector<at::Tensor> linears(const at::Tensor& x, const std::vector<at::Tensor>& weights,
                                const std::vector<at::Tensor>& biases);

// Biases as an autograd function takes them: those there are, and which weights have one.
struct Biases {
  Biases(const std::vector<at::Tensor>& weights, const std::vector<at::Tensor>& biases);
  std::vector<at::Tensor> present{};
  std::vector<std::int64_t> has{};
};

// residual + x Wᵀ + b.
at::Tensor linear_onto(const at::Tensor& residual, const at::Tensor& x, const at::Tensor& weight,
                       const at::Tensor& bias);

// In backward: dyᵀ x, [n, k], as the gradient of a weight of that shape; dy [m, n], x [m, k]. Written where
// the parameter's gradient is kept, if that can be had (comm/autograd.hpp).
at::Tensor weight_gradient(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight);

namespace naive_twin {
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double epsilon);
at::Tensor rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);
}  // namespace naive_twin

}  // namespace isograd
