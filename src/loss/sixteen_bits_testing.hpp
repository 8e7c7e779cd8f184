// LibTorch's functions, each as it is called, by the names of their nodes.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace isograd::sixteen_bits_testing {

using Function = std::function<at::Tensor(const at::Tensor& x)>;  // of x [4, 4], between 0.1 and 0.9
using Functions = std::vector<std::pair<std::string, Function>>;
// A node's name, and an expression of x that has it.
#define ISOGRAD_OF(name, ...)                             \
  {                                                       \
    name, [](const at::Tensor& x) { return __VA_ARGS__; } \
  }

// In single precision, from a tensor in bf16 that a model has computed.
inline at::Tensor converted() {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(5);
  at::Tensor weight = (at::rand({4, 4}, generator) * 0.4 + 0.05).to(at::kBFloat16).requires_grad_(true);
  return (weight * 2).to(at::kFloat);
}

using at::Tensor;
constexpr auto kSum = at::Reduction::Sum;
inline Tensor likewise(double value) { return at::full({4, 4}, value); }
inline Tensor regular(const Tensor& x) { return at::mm(x, x.t()) + at::eye(4); }

inline const Functions kOwnSlope = {
    ISOGRAD_OF("Acos", x.acos()),
    ISOGRAD_OF("Acosh", (x + 1).acosh()),
    ISOGRAD_OF("Asin", x.asin()),
    ISOGRAD_OF("Asinh", x.asinh()),
    ISOGRAD_OF("Atan", x.atan()),
    ISOGRAD_OF("Atan2", at::atan2(x, likewise(1))),
    ISOGRAD_OF("Atanh", x.atanh()),
    {"BatchNormNoUpdate",
     [](const Tensor& x) {
       return std::get<0>(at::_batch_norm_no_update(x, at::ones({4}), at::ones({4}), at::ones({4}),
                                                    at::ones({4}), 0.1, 1e-5));
     }},
    {"BatchNormWithUpdate",
     [](const Tensor& x) {
       Tensor mean = at::ones({4}), variance = at::ones({4});
       return std::get<0>(
           at::_batch_norm_with_update(x, at::ones({4}), at::ones({4}), mean, variance, 0.1, 1e-5));
     }},
    ISOGRAD_OF("BinaryCrossEntropy", at::binary_cross_entropy(x, likewise(1), {}, kSum)),
    {"BinaryCrossEntropyWithLogits",
     [](const Tensor& x) { return at::binary_cross_entropy_with_logits(x, likewise(1), {}, {}, kSum); }},
    ISOGRAD_OF("Cdist", at::cdist(x, likewise(2), 3)),
    ISOGRAD_OF("Celu", at::celu(x)),
    ISOGRAD_OF("Cos", x.cos()),
    ISOGRAD_OF("Cosh", x.cosh()),
    {"CtcLoss",
     [](const Tensor& x) {
       return at::ctc_loss(x.unsqueeze(1), at::ones({1, 2}, at::kLong), at::IntArrayRef({4}),
                           at::IntArrayRef({2}), 0, kSum);
     }},
    ISOGRAD_OF("Cumprod", x.cumprod(0)),
    ISOGRAD_OF("Digamma", x.digamma()),
    ISOGRAD_OF("Dist", at::dist(x, likewise(2))),
    ISOGRAD_OF("Elu", at::elu(x)),
    ISOGRAD_OF("Erf", x.erf()),
    ISOGRAD_OF("Erfc", x.erfc()),
    ISOGRAD_OF("Erfinv", x.erfinv()),
    ISOGRAD_OF("EuclideanDist", at::cdist(x, likewise(2), 2, 1)),
    ISOGRAD_OF("Exp", x.exp()),
    ISOGRAD_OF("Exp2", x.exp2()),
    ISOGRAD_OF("Expm1", x.expm1()),
    ISOGRAD_OF("Gelu", at::gelu(x)),
    ISOGRAD_OF("Glu", at::glu(x)),
    ISOGRAD_OF("Hardswish", at::hardswish(x)),
    ISOGRAD_OF("HuberLoss", at::huber_loss(x, likewise(1), kSum)),
    ISOGRAD_OF("Hypot", at::hypot(x, likewise(1))),
    ISOGRAD_OF("I0", x.i0()),
    ISOGRAD_OF("Lgamma", x.lgamma()),
    ISOGRAD_OF("LinalgCholeskyEx", at::linalg_cholesky(regular(x))),
    ISOGRAD_OF("LinalgDet", at::linalg_det(x + at::eye(4))),
    ISOGRAD_OF("LinalgEigh", std::get<0>(at::linalg_eigh(regular(x)))),
    ISOGRAD_OF("LinalgInvEx", at::linalg_inv(x + at::eye(4))),
    ISOGRAD_OF("LinalgMatrixExp", at::linalg_matrix_exp(x)),
    ISOGRAD_OF("LinalgQr", std::get<1>(at::linalg_qr(x))),
    ISOGRAD_OF("LinalgSlogdet", std::get<1>(at::linalg_slogdet(x + at::eye(4)))),
    ISOGRAD_OF("LinalgSolveEx", at::linalg_solve(x + at::eye(4), likewise(1))),
    ISOGRAD_OF("LinalgSvd", std::get<1>(at::linalg_svd(x))),
    ISOGRAD_OF("LinalgVectorNorm", at::linalg_vector_norm(x, 2, at::IntArrayRef({1}))),
    ISOGRAD_OF("Log", x.log()),
    ISOGRAD_OF("Log10", x.log10()),
    ISOGRAD_OF("Log1P", x.log1p()),
    ISOGRAD_OF("Log2", x.log2()),
    ISOGRAD_OF("LogSigmoid", at::log_sigmoid(x)),
    ISOGRAD_OF("LogSoftmax", at::log_softmax(x, 1)),
    ISOGRAD_OF("Logaddexp", at::logaddexp(x, likewise(1))),
    ISOGRAD_OF("Logaddexp2", at::logaddexp2(x, likewise(1))),
    ISOGRAD_OF("Logcumsumexp", at::logcumsumexp(x, 0)),
    ISOGRAD_OF("Logit", x.logit()),
    ISOGRAD_OF("Logsumexp", x.logsumexp(1)),
    ISOGRAD_OF("MaskedSoftmax", at::_masked_softmax(x, at::zeros({4, 4}, at::kBool), 1, 2)),
    ISOGRAD_OF("Mish", at::mish(x)),
    ISOGRAD_OF("MseLoss", at::mse_loss(x, likewise(1), kSum)),
    ISOGRAD_OF("Mvlgamma", (x + 2).mvlgamma(2)),
    ISOGRAD_OF("NativeBatchNorm", std::get<0>(at::native_batch_norm(x, {}, {}, {}, {}, true, 0.1, 1e-5))),
    {"NativeBatchNormLegit",
     [](const Tensor& x) { return std::get<0>(at::_native_batch_norm_legit(x, {}, {}, true, 0.1, 1e-5)); }},
    {"NativeBatchNormLegitNoTraining",
     [](const Tensor& x) {
       return std::get<0>(
           at::_native_batch_norm_legit_no_training(x, {}, {}, at::ones({4}), at::ones({4}), 0.1, 1e-5));
     }},
    ISOGRAD_OF("NativeGroupNorm", at::group_norm(x, 2)),
    ISOGRAD_OF("NativeLayerNorm", at::layer_norm(x, {4})),
    ISOGRAD_OF("Norm", at::norm(x, 3)),
    ISOGRAD_OF("Pdist", at::pdist(x)),
    ISOGRAD_OF("Polygamma", at::polygamma(1, x)),
    ISOGRAD_OF("Pow", x.square()),
    ISOGRAD_OF("Prod", x.prod(1)),
    ISOGRAD_OF("Reciprocal", x.reciprocal()),
    ISOGRAD_OF("Rsqrt", x.rsqrt()),
    ISOGRAD_OF("SafeSoftmax", at::_safe_softmax(x, 1)),
    {"ScaledDotProductFlashAttentionForCpu",
     [](const Tensor& x) {
       const Tensor y = x.view({1, 1, 4, 4});
       return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(y, y, y));
     }},
    ISOGRAD_OF("Sigmoid", x.sigmoid()),
    ISOGRAD_OF("Silu", at::silu(x)),
    ISOGRAD_OF("Sin", x.sin()),
    ISOGRAD_OF("Sinc", x.sinc()),
    ISOGRAD_OF("Sinh", x.sinh()),
    ISOGRAD_OF("SmoothL1Loss", at::smooth_l1_loss(x, likewise(1), kSum)),
    ISOGRAD_OF("SoftMarginLoss", at::soft_margin_loss(x, likewise(1), kSum)),
    ISOGRAD_OF("Softmax", x.softmax(1)),
    ISOGRAD_OF("Softplus", at::softplus(x)),
    ISOGRAD_OF("SpecialEntr", at::special_entr(x)),
    ISOGRAD_OF("SpecialErfcx", at::special_erfcx(x)),
    ISOGRAD_OF("SpecialI0E", at::special_i0e(x)),
    ISOGRAD_OF("SpecialI1", at::special_i1(x)),
    ISOGRAD_OF("SpecialI1E", at::special_i1e(x)),
    ISOGRAD_OF("SpecialLogNdtr", at::special_log_ndtr(x)),
    ISOGRAD_OF("SpecialNdtri", at::special_ndtri(x)),
    ISOGRAD_OF("SpecialXlog1Py", at::special_xlog1py(likewise(1), x)),
    ISOGRAD_OF("Sqrt", x.sqrt()),
    ISOGRAD_OF("Std", x.std(1)),
    ISOGRAD_OF("StdMean", std::get<0>(at::std_mean(x, 1))),
    ISOGRAD_OF("Tan", x.tan()),
    ISOGRAD_OF("Tanh", x.tanh()),
    ISOGRAD_OF("Var", x.var(1)),
    ISOGRAD_OF("VarMean", std::get<0>(at::var_mean(x, 1))),
    ISOGRAD_OF("WeightNormInterface", std::get<0>(at::_weight_norm_interface(x, at::ones({4, 1}), 0))),
    ISOGRAD_OF("Xlogy", at::xlogy(likewise(1), x))};

// Not in any list, or in that of products: what they are multiplied by has no autograd history.
inline const Functions kMultiplying = {
    ISOGRAD_OF("Addbmm", at::addbmm(likewise(1), x.unsqueeze(0), at::ones({1, 4, 4}))),
    ISOGRAD_OF("Addcdiv", at::addcdiv(likewise(1), x, likewise(3))),
    ISOGRAD_OF("Addcmul", at::addcmul(likewise(1), x, likewise(3))),
    ISOGRAD_OF("Addmm", at::addmm(x, likewise(1), likewise(3)) + at::addmm(at::ones({4}), x, likewise(3))),
    ISOGRAD_OF("Addmv", at::addmv(at::ones({4}), x, at::ones({4}))),
    ISOGRAD_OF("Addr", at::addr(likewise(1), x[0], at::ones({4}))),
    ISOGRAD_OF("Baddbmm", at::baddbmm(at::ones({1, 4, 4}), x.unsqueeze(0), at::ones({1, 4, 4}))),
    ISOGRAD_OF("Bmm", at::bmm(x.unsqueeze(0), at::ones({1, 4, 4}))),
    ISOGRAD_OF("Convolution", at::conv1d(x.unsqueeze(0), at::ones({1, 4, 1}))),
    ISOGRAD_OF("Div", x / likewise(3)),
    ISOGRAD_OF("Dot", at::dot(x[0], at::ones({4}))),
    ISOGRAD_OF("LinalgCross", at::linalg_cross(x.narrow(1, 0, 3), at::ones({4, 3}))),
    ISOGRAD_OF("Mm", at::mm(x, likewise(1))),
    ISOGRAD_OF("Mul", x* likewise(1)),
    ISOGRAD_OF("Mv", at::mv(x, at::ones({4}))),
    ISOGRAD_OF("Vdot", at::vdot(x[0], at::ones({4}))),
    ISOGRAD_OF("Amax", x.amax(1)),
    ISOGRAD_OF("Amin", x.amin(1)),
    ISOGRAD_OF("AvgPool2D", at::avg_pool2d(x.unsqueeze(0), 2)),
    ISOGRAD_OF("Cdist", at::cdist(x, likewise(2), 1)),
    ISOGRAD_OF("ConstantPadNd", at::constant_pad_nd(x, {1, 1})),
    ISOGRAD_OF("Cummax", std::get<0>(x.cummax(0))),
    ISOGRAD_OF("Cumsum", x.cumsum(0).select(0, 3)),
    ISOGRAD_OF("Diagonal", x.diagonal()),
    ISOGRAD_OF("Dist", at::dist(x, likewise(2), 1)),
    ISOGRAD_OF("Expand", x.unsqueeze(0).expand({3, 4, 4})),
    ISOGRAD_OF("Flip", x.flip(0)),
    ISOGRAD_OF("Gather", x.gather(1, at::zeros({4, 1}, at::kLong)).squeeze(1)),
    ISOGRAD_OF("Hardsigmoid", at::hardsigmoid(x)),
    ISOGRAD_OF("Hardtanh", at::hardtanh(x)),
    ISOGRAD_OF("Index", x.index({at::zeros({2}, at::kLong)})),
    ISOGRAD_OF("IndexPut", at::zeros({4, 4}).index_put({at::arange(4)}, x)),
    ISOGRAD_OF("IndexSelect", x.index_select(0, at::zeros({2}, at::kLong))),
    ISOGRAD_OF("Kthvalue", std::get<0>(x.kthvalue(2))),
    ISOGRAD_OF("LeakyRelu", at::leaky_relu(x)),
    ISOGRAD_OF("Lerp", at::lerp(x, likewise(1), 0.5)),
    ISOGRAD_OF("LinalgVectorNorm", at::linalg_vector_norm(x, 1, at::IntArrayRef({1}))),
    ISOGRAD_OF("Max", std::get<0>(x.max(1))),
    ISOGRAD_OF("Maximum", at::maximum(x, likewise(0))),
    ISOGRAD_OF("MaxPool2DWithIndices", std::get<0>(at::max_pool2d_with_indices(x.unsqueeze(0), 2))),
    ISOGRAD_OF("Mean", x.mean(1)),
    ISOGRAD_OF("Median", std::get<0>(x.median(1))),
    ISOGRAD_OF("Min", std::get<0>(x.min(1))),
    ISOGRAD_OF("Minimum", at::minimum(x, likewise(1))),
    ISOGRAD_OF("Nansum", x.nansum(1)),
    ISOGRAD_OF("NllLoss", at::nll_loss(x, at::zeros({4}, at::kLong), {}, kSum)),
    ISOGRAD_OF("Norm", at::norm(x, 1)),
    ISOGRAD_OF("Pdist", at::pdist(x, 1)),
    ISOGRAD_OF("Repeat", x.repeat({2, 1})),
    ISOGRAD_OF("Roll", x.roll(1)),
    ISOGRAD_OF("Scatter", at::zeros({4, 4}).scatter(0, at::zeros({1, 4}, at::kLong), x)),
    ISOGRAD_OF("ScatterAdd", at::zeros({4, 4}).scatter_add(0, at::zeros({4, 4}, at::kLong), x)),
    ISOGRAD_OF("Sort", std::get<0>(x.sort(1))),
    ISOGRAD_OF("Take", x.take(at::zeros({2}, at::kLong))),
    ISOGRAD_OF("Topk", std::get<0>(x.topk(2))),
    ISOGRAD_OF("Trace", x.trace()),
    ISOGRAD_OF("Tril", x.tril())};

inline const Functions kCopying = {ISOGRAD_OF("Abs", (x - likewise(1)).abs()),
                                   ISOGRAD_OF("Add", x + likewise(1)),
                                   ISOGRAD_OF("Alias", at::alias(x)),
                                   ISOGRAD_OF("Cat", at::cat({x, likewise(1)})),
                                   ISOGRAD_OF("Clamp", x.clamp(0.2, 0.4)),
                                   ISOGRAD_OF("ClampMax", x.clamp_max(0.4)),
                                   ISOGRAD_OF("ClampMin", x.clamp_min(0.4)),
                                   ISOGRAD_OF("Clone", x.clone()),
                                   ISOGRAD_OF("MaskedFill", x.masked_fill(x > 0.4, 0)),
                                   ISOGRAD_OF("MaskedSelect", x.masked_select(x > 0.4)),
                                   ISOGRAD_OF("Neg", -x),
                                   ISOGRAD_OF("Permute", x.permute({1, 0})),
                                   ISOGRAD_OF("Relu", (x - likewise(0.4)).relu()),
                                   ISOGRAD_OF("ReshapeAlias", at::_reshape_alias(x, {2, 8}, {8, 1})),
                                   ISOGRAD_OF("Select", x.select(0, 1)),
                                   ISOGRAD_OF("Slice", x.slice(0, 1)),
                                   ISOGRAD_OF("Split", x.split(2)[0]),
                                   ISOGRAD_OF("SplitWithSizes", x.split_with_sizes({1, 3})[0]),
                                   ISOGRAD_OF("Squeeze", x.narrow(0, 0, 1).squeeze(0)),
                                   ISOGRAD_OF("Stack", at::stack({x[0], x[1]})),
                                   ISOGRAD_OF("Sub", likewise(1) - x),
                                   ISOGRAD_OF("Sum", x.sum(1)),
                                   ISOGRAD_OF("T", x.t()),
                                   ISOGRAD_OF("ToCopy", x.to(at::kDouble)),
                                   ISOGRAD_OF("Transpose", x.transpose(0, 1)),
                                   ISOGRAD_OF("Unbind", x.unbind()[1]),
                                   ISOGRAD_OF("UnsafeView", at::_unsafe_view(x, {2, 8})),
                                   ISOGRAD_OF("Unsqueeze", x.unsqueeze(0)),
                                   ISOGRAD_OF("View", x.view({2, 8})),
                                   ISOGRAD_OF("Where", at::where(x > 0.4, x, likewise(0)))};

#undef ISOGRAD_OF

}  // namespace isograd::sixteen_bits_testing
