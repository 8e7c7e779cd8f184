// Matrix products at the seams, computed while tokens or their gradients are on their way.
#pragma once

#include "isograd/group.hpp"
#include "isograd/tensor_parallel.hpp"

namespace isograd {

// enter() or, with `rows`, enter_cut() of x, and its products with `weights` [out, in] and `biases`,
// undefined where there is none: [T, out] each. In backward the gradient of x is summed over the ranks while
// those of weights and biases are computed. kTokens: own tokens are multiplied while the others come.
// Collective over tp, in forward and in backward; differentiable once.
std::vector<at::Tensor> enter_linears(Group tp, const at::Tensor& x, const Group::Rows& rows,
                                      const std::vector<at::Tensor>& weights,
                                      const std::vector<at::Tensor>& biases, TensorOverlap overlap);

// leave_cut() of x Wᵀ. Forward: what other ranks' tokens get from here is on its way while own tokens are
// multiplied. Backward: the gradient of the weight by own tokens is computed while the others' come. x [T,
// in], weight [out, in]; [rows[tp.rank()], out]. Collective and differentiable likewise.
at::Tensor linear_leave_cut(Group tp, const at::Tensor& x, const at::Tensor& weight, const Group::Rows& rows);

}  // namespace isograd
