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
    {"Acos", [](const Tensor& x) { return x.acos(); }},
    {"Acosh", [](const Tensor& x) { return (x + 1).acosh(); }},
    {"Asin", [](const Tensor& x) { return x.asin(); }},
    {"Asinh", [](const Tensor& x) { return x.asinh(); }},
    {"Atan", [](const Tensor& x) { return x.atan(); }},
    {"Atan2", [](const Tensor& x) { return at::atan2(x, likewise(1)); }},
    {"Atanh", [](const Tensor& x) { return x.atanh(); }},
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
    {"BinaryCrossEntropy",
     [](const Tensor& x) { return at::binary_cross_entropy(x, likewise(1), {}, kSum); }},
    {"BinaryCrossEntropyWithLogits",
     [](const Tensor& x) { return at::binary_cross_entropy_with_logits(x, likewise(1), {}, {}, kSum); }},
    {"Cdist", [](const Tensor& x) { return at::cdist(x, likewise(2), 3); }},
    {"Celu", [](const Tensor& x) { return at::celu(x); }},
    {"Cos", [](const Tensor& x) { return x.cos(); }},
    {"Cosh", [](const Tensor& x) { return x.cosh(); }},
    {"CtcLoss",
     [](const Tensor& x) {
       return at::ctc_loss(x.unsqueeze(1), at::ones({1, 2}, at::kLong), at::IntArrayRef({4}),
                           at::IntArrayRef({2}), 0, kSum);
     }},
    {"Cumprod", [](const Tensor& x) { return x.cumprod(0); }},
    {"Digamma", [](const Tensor& x) { return x.digamma(); }},
    {"Dist", [](const Tensor& x) { return at::dist(x, likewise(2)); }},
    {"Elu", [](const Tensor& x) { return at::elu(x); }},
    {"Erf", [](const Tensor& x) { return x.erf(); }},
    {"Erfc", [](const Tensor& x) { return x.erfc(); }},
    {"Erfinv", [](const Tensor& x) { return x.erfinv(); }},
    {"EuclideanDist", [](const Tensor& x) { return at::cdist(x, likewise(2), 2, 1); }},
    {"Exp", [](const Tensor& x) { return x.exp(); }},
    {"Exp2", [](const Tensor& x) { return x.exp2(); }},
    {"Expm1", [](const Tensor& x) { return x.expm1(); }},
    {"Gelu", [](const Tensor& x) { return at::gelu(x); }},
    {"Glu", [](const Tensor& x) { return at::glu(x); }},
    {"Hardswish", [](const Tensor& x) { return at::hardswish(x); }},
    {"HuberLoss", [](const Tensor& x) { return at::huber_loss(x, likewise(1), kSum); }},
    {"Hypot", [](const Tensor& x) { return at::hypot(x, likewise(1)); }},
    {"I0", [](const Tensor& x) { return x.i0(); }},
    {"Lgamma", [](const Tensor& x) { return x.lgamma(); }},
    {"LinalgCholeskyEx", [](const Tensor& x) { return at::linalg_cholesky(regular(x)); }},
    {"LinalgDet", [](const Tensor& x) { return at::linalg_det(x + at::eye(4)); }},
    {"LinalgEigh", [](const Tensor& x) { return std::get<0>(at::linalg_eigh(regular(x))); }},
    {"LinalgInvEx", [](const Tensor& x) { return at::linalg_inv(x + at::eye(4)); }},
    {"LinalgMatrixExp", [](const Tensor& x) { return at::linalg_matrix_exp(x); }},
    {"LinalgQr", [](const Tensor& x) { return std::get<1>(at::linalg_qr(x)); }},
    {"LinalgSlogdet", [](const Tensor& x) { return std::get<1>(at::linalg_slogdet(x + at::eye(4))); }},
    {"LinalgSolveEx", [](const Tensor& x) { return at::linalg_solve(x + at::eye(4), likewise(1)); }},
    {"LinalgSvd", [](const Tensor& x) { return std::get<1>(at::linalg_svd(x)); }},
    {"LinalgVectorNorm", [](const Tensor& x) { return at::linalg_vector_norm(x, 2, at::IntArrayRef({1})); }},
    {"Log", [](const Tensor& x) { return x.log(); }},
    {"Log10", [](const Tensor& x) { return x.log10(); }},
    {"Log1P", [](const Tensor& x) { return x.log1p(); }},
    {"Log2", [](const Tensor& x) { return x.log2(); }},
    {"LogSigmoid", [](const Tensor& x) { return at::log_sigmoid(x); }},
    {"LogSoftmax", [](const Tensor& x) { return at::log_softmax(x, 1); }},
    {"Logaddexp", [](const Tensor& x) { return at::logaddexp(x, likewise(1)); }},
    {"Logaddexp2", [](const Tensor& x) { return at::logaddexp2(x, likewise(1)); }},
    {"Logcumsumexp", [](const Tensor& x) { return at::logcumsumexp(x, 0); }},
    {"Logit", [](const Tensor& x) { return x.logit(); }},
    {"Logsumexp", [](const Tensor& x) { return x.logsumexp(1); }},
    {"MaskedSoftmax",
     [](const Tensor& x) {
       return at::_masked_softmax(x, at::zeros({4, 4}, at::kBool), 1, 2);
     }},
    {"Mish", [](const Tensor& x) { return at::mish(x); }},
    {"MseLoss", [](const Tensor& x) { return at::mse_loss(x, likewise(1), kSum); }},
    {"Mvlgamma", [](const Tensor& x) { return (x + 2).mvlgamma(2); }},
    {"NativeBatchNorm",
     [](const Tensor& x) { return std::get<0>(at::native_batch_norm(x, {}, {}, {}, {}, true, 0.1, 1e-5)); }},
    {"NativeBatchNormLegit",
     [](const Tensor& x) { return std::get<0>(at::_native_batch_norm_legit(x, {}, {}, true, 0.1, 1e-5)); }},
    {"NativeBatchNormLegitNoTraining",
     [](const Tensor& x) {
       return std::get<0>(
           at::_native_batch_norm_legit_no_training(x, {}, {}, at::ones({4}), at::ones({4}), 0.1, 1e-5));
     }},
    {"NativeGroupNorm", [](const Tensor& x) { return at::group_norm(x, 2); }},
    {"NativeLayerNorm", [](const Tensor& x) { return at::layer_norm(x, {4}); }},
    {"Norm", [](const Tensor& x) { return at::norm(x, 3); }},
    {"Pdist", [](const Tensor& x) { return at::pdist(x); }},
    {"Polygamma", [](const Tensor& x) { return at::polygamma(1, x); }},
    {"Pow", [](const Tensor& x) { return x.square(); }},
    {"Prod", [](const Tensor& x) { return x.prod(1); }},
    {"Reciprocal", [](const Tensor& x) { return x.reciprocal(); }},
    {"Rsqrt", [](const Tensor& x) { return x.rsqrt(); }},
    {"SafeSoftmax", [](const Tensor& x) { return at::_safe_softmax(x, 1); }},
    {"ScaledDotProductFlashAttentionForCpu",
     [](const Tensor& x) {
       const Tensor y = x.view({1, 1, 4, 4});
       return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(y, y, y));
     }},
    {"Sigmoid", [](const Tensor& x) { return x.sigmoid(); }},
    {"Silu", [](const Tensor& x) { return at::silu(x); }},
    {"Sin", [](const Tensor& x) { return x.sin(); }},
    {"Sinc", [](const Tensor& x) { return x.sinc(); }},
    {"Sinh", [](const Tensor& x) { return x.sinh(); }},
    {"SmoothL1Loss", [](const Tensor& x) { return at::smooth_l1_loss(x, likewise(1), kSum); }},
    {"SoftMarginLoss", [](const Tensor& x) { return at::soft_margin_loss(x, likewise(1), kSum); }},
    {"Softmax", [](const Tensor& x) { return x.softmax(1); }},
    {"Softplus", [](const Tensor& x) { return at::softplus(x); }},
    {"SpecialEntr", [](const Tensor& x) { return at::special_entr(x); }},
    {"SpecialErfcx", [](const Tensor& x) { return at::special_erfcx(x); }},
    {"SpecialI0E", [](const Tensor& x) { return at::special_i0e(x); }},
    {"SpecialI1", [](const Tensor& x) { return at::special_i1(x); }},
    {"SpecialI1E", [](const Tensor& x) { return at::special_i1e(x); }},
    {"SpecialLogNdtr", [](const Tensor& x) { return at::special_log_ndtr(x); }},
    {"SpecialNdtri", [](const Tensor& x) { return at::special_ndtri(x); }},
    {"SpecialXlog1Py", [](const Tensor& x) { return at::special_xlog1py(likewise(1), x); }},
    {"Sqrt", [](const Tensor& x) { return x.sqrt(); }},
    {"Std", [](const Tensor& x) { return x.std(1); }},
    {"StdMean", [](const Tensor& x) { return std::get<0>(at::std_mean(x, 1)); }},
    {"Tan", [](const Tensor& x) { return x.tan(); }},
    {"Tanh", [](const Tensor& x) { return x.tanh(); }},
    {"Var", [](const Tensor& x) { return x.var(1); }},
    {"VarMean", [](const Tensor& x) { return std::get<0>(at::var_mean(x, 1)); }},
    {"WeightNormInterface",
     [](const Tensor& x) { return std::get<0>(at::_weight_norm_interface(x, at::ones({4, 1}), 0)); }},
    {"Xlogy", [](const Tensor& x) { return at::xlogy(likewise(1), x); }}};

// Not in any list, or in that of products: what they are multiplied by hangs on nothing.
inline const Functions kMultiplying = {
    {"Addbmm",
     [](const Tensor& x) {
       return at::addbmm(likewise(1), x.unsqueeze(0), at::ones({1, 4, 4}));
     }},
    {"Addcdiv", [](const Tensor& x) { return at::addcdiv(likewise(1), x, likewise(3)); }},
    {"Addcmul", [](const Tensor& x) { return at::addcmul(likewise(1), x, likewise(3)); }},
    {"Addmm",
     [](const Tensor& x) {
       return at::addmm(x, likewise(1), likewise(3)) + at::addmm(at::ones({4}), x, likewise(3));
     }},
    {"Addmv", [](const Tensor& x) { return at::addmv(at::ones({4}), x, at::ones({4})); }},
    {"Addr", [](const Tensor& x) { return at::addr(likewise(1), x[0], at::ones({4})); }},
    {"Baddbmm",
     [](const Tensor& x) {
       return at::baddbmm(at::ones({1, 4, 4}), x.unsqueeze(0), at::ones({1, 4, 4}));
     }},
    {"Bmm",
     [](const Tensor& x) {
       return at::bmm(x.unsqueeze(0), at::ones({1, 4, 4}));
     }},
    {"Convolution",
     [](const Tensor& x) {
       return at::conv1d(x.unsqueeze(0), at::ones({1, 4, 1}));
     }},
    {"Div", [](const Tensor& x) { return x / likewise(3); }},
    {"Dot", [](const Tensor& x) { return at::dot(x[0], at::ones({4})); }},
    {"LinalgCross",
     [](const Tensor& x) {
       return at::linalg_cross(x.narrow(1, 0, 3), at::ones({4, 3}));
     }},
    {"Mm", [](const Tensor& x) { return at::mm(x, likewise(1)); }},
    {"Mul", [](const Tensor& x) { return x * likewise(1); }},
    {"Mv", [](const Tensor& x) { return at::mv(x, at::ones({4})); }},
    {"Vdot", [](const Tensor& x) { return at::vdot(x[0], at::ones({4})); }},
    {"Amax", [](const Tensor& x) { return x.amax(1); }},
    {"Amin", [](const Tensor& x) { return x.amin(1); }},
    {"AvgPool2D", [](const Tensor& x) { return at::avg_pool2d(x.unsqueeze(0), 2); }},
    {"Cdist", [](const Tensor& x) { return at::cdist(x, likewise(2), 1); }},
    {"ConstantPadNd",
     [](const Tensor& x) {
       return at::constant_pad_nd(x, {1, 1});
     }},
    {"Cummax", [](const Tensor& x) { return std::get<0>(x.cummax(0)); }},
    {"Cumsum", [](const Tensor& x) { return x.cumsum(0).select(0, 3); }},
    {"Diagonal", [](const Tensor& x) { return x.diagonal(); }},
    {"Dist", [](const Tensor& x) { return at::dist(x, likewise(2), 1); }},
    {"Expand",
     [](const Tensor& x) {
       return x.unsqueeze(0).expand({3, 4, 4});
     }},
    {"Flip", [](const Tensor& x) { return x.flip(0); }},
    {"Gather",
     [](const Tensor& x) {
       return x.gather(1, at::zeros({4, 1}, at::kLong)).squeeze(1);
     }},
    {"Hardsigmoid", [](const Tensor& x) { return at::hardsigmoid(x); }},
    {"Hardtanh", [](const Tensor& x) { return at::hardtanh(x); }},
    {"Index", [](const Tensor& x) { return x.index({at::zeros({2}, at::kLong)}); }},
    {"IndexPut",
     [](const Tensor& x) {
       return at::zeros({4, 4}).index_put({at::arange(4)}, x);
     }},
    {"IndexSelect", [](const Tensor& x) { return x.index_select(0, at::zeros({2}, at::kLong)); }},
    {"Kthvalue", [](const Tensor& x) { return std::get<0>(x.kthvalue(2)); }},
    {"LeakyRelu", [](const Tensor& x) { return at::leaky_relu(x); }},
    {"Lerp", [](const Tensor& x) { return at::lerp(x, likewise(1), 0.5); }},
    {"LinalgVectorNorm", [](const Tensor& x) { return at::linalg_vector_norm(x, 1, at::IntArrayRef({1})); }},
    {"Max", [](const Tensor& x) { return std::get<0>(x.max(1)); }},
    {"Maximum", [](const Tensor& x) { return at::maximum(x, likewise(0)); }},
    {"MaxPool2DWithIndices",
     [](const Tensor& x) { return std::get<0>(at::max_pool2d_with_indices(x.unsqueeze(0), 2)); }},
    {"Mean", [](const Tensor& x) { return x.mean(1); }},
    {"Median", [](const Tensor& x) { return std::get<0>(x.median(1)); }},
    {"Min", [](const Tensor& x) { return std::get<0>(x.min(1)); }},
    {"Minimum", [](const Tensor& x) { return at::minimum(x, likewise(1)); }},
    {"Nansum", [](const Tensor& x) { return x.nansum(1); }},
    {"NllLoss", [](const Tensor& x) { return at::nll_loss(x, at::zeros({4}, at::kLong), {}, kSum); }},
    {"Norm", [](const Tensor& x) { return at::norm(x, 1); }},
    {"Pdist", [](const Tensor& x) { return at::pdist(x, 1); }},
    {"Repeat",
     [](const Tensor& x) {
       return x.repeat({2, 1});
     }},
    {"Roll", [](const Tensor& x) { return x.roll(1); }},
    {"Scatter",
     [](const Tensor& x) {
       return at::zeros({4, 4}).scatter(0, at::zeros({1, 4}, at::kLong), x);
     }},
    {"ScatterAdd",
     [](const Tensor& x) {
       return at::zeros({4, 4}).scatter_add(0, at::zeros({4, 4}, at::kLong), x);
     }},
    {"Sort", [](const Tensor& x) { return std::get<0>(x.sort(1)); }},
    {"Take", [](const Tensor& x) { return x.take(at::zeros({2}, at::kLong)); }},
    {"Topk", [](const Tensor& x) { return std::get<0>(x.topk(2)); }},
    {"Trace", [](const Tensor& x) { return x.trace(); }},
    {"Tril", [](const Tensor& x) { return x.tril(); }}};

inline const Functions kCopying = {
    {"Abs", [](const Tensor& x) { return (x - likewise(1)).abs(); }},
    {"Add", [](const Tensor& x) { return x + likewise(1); }},
    {"Alias", [](const Tensor& x) { return at::alias(x); }},
    {"Cat",
     [](const Tensor& x) {
       return at::cat({x, likewise(1)});
     }},
    {"Clamp", [](const Tensor& x) { return x.clamp(0.2, 0.4); }},
    {"ClampMax", [](const Tensor& x) { return x.clamp_max(0.4); }},
    {"ClampMin", [](const Tensor& x) { return x.clamp_min(0.4); }},
    {"Clone", [](const Tensor& x) { return x.clone(); }},
    {"MaskedFill", [](const Tensor& x) { return x.masked_fill(x > 0.4, 0); }},
    {"MaskedSelect", [](const Tensor& x) { return x.masked_select(x > 0.4); }},
    {"Neg", [](const Tensor& x) { return -x; }},
    {"Permute",
     [](const Tensor& x) {
       return x.permute({1, 0});
     }},
    {"Relu", [](const Tensor& x) { return (x - likewise(0.4)).relu(); }},
    {"ReshapeAlias",
     [](const Tensor& x) {
       return at::_reshape_alias(x, {2, 8}, {8, 1});
     }},
    {"Select", [](const Tensor& x) { return x.select(0, 1); }},
    {"Slice", [](const Tensor& x) { return x.slice(0, 1); }},
    {"Split", [](const Tensor& x) { return x.split(2)[0]; }},
    {"SplitWithSizes",
     [](const Tensor& x) {
       return x.split_with_sizes({1, 3})[0];
     }},
    {"Squeeze", [](const Tensor& x) { return x.narrow(0, 0, 1).squeeze(0); }},
    {"Stack",
     [](const Tensor& x) {
       return at::stack({x[0], x[1]});
     }},
    {"Sub", [](const Tensor& x) { return likewise(1) - x; }},
    {"Sum", [](const Tensor& x) { return x.sum(1); }},
    {"T", [](const Tensor& x) { return x.t(); }},
    {"ToCopy", [](const Tensor& x) { return x.to(at::kDouble); }},
    {"Transpose", [](const Tensor& x) { return x.transpose(0, 1); }},
    {"Unbind", [](const Tensor& x) { return x.unbind()[1]; }},
    {"UnsafeView",
     [](const Tensor& x) {
       return at::_unsafe_view(x, {2, 8});
     }},
    {"Unsqueeze", [](const Tensor& x) { return x.unsqueeze(0); }},
    {"View",
     [](const Tensor& x) {
       return x.view({2, 8});
     }},
    {"Where", [](const Tensor& x) { return at::where(x > 0.4, x, likewise(0)); }}};

}  // namespace isograd::sixteen_bits_testing
