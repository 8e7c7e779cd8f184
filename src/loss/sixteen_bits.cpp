// The gradient that flows back into a sum: where it is rounded to 16 bits while it is still one number for
// all elements.
#include <fmt/format.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <algorithm>
#include <cmath>
#include <typeinfo>
#include <unordered_map>

#include "base/refuse.hpp"
#include "loss/share.hpp"

namespace isograd {
namespace {

using torch::autograd::Node;
namespace generated = torch::autograd::generated;

// LibTorch's own, not a custom function (torch::autograd::CppNode<...>, PyNode).
bool is_libtorchs(const Node& node) {
  const std::string type = c10::demangle(typeid(node).name());
  return type.rfind("torch::autograd::", 0) == 0 && type.find("CppNode<") == std::string::npos &&
         type.find("PyNode") == std::string::npos;
}

std::string function_of(const Node& node) {
  std::string name = node.name();
  if (const auto colons = name.rfind("::"); colons != std::string::npos) name = name.substr(colons + 2);
  if (name.rfind("Foreach", 0) == 0) name = name.substr(std::string("Foreach").size());
  return name.substr(0, name.find("Backward"));
}

// The slope of |x|_p is the same for all elements, except for signs, where p is 1; for few where p is
// infinite.
bool has_constant_slope(const at::Scalar& p) { return p.toDouble() == 1 || std::isinf(p.toDouble()); }
bool is_linear(const Node& node) {
  if (const auto* pow = dynamic_cast<const generated::PowBackward0*>(&node))
    return !pow->exponent.isComplex() && pow->exponent.toDouble() == 1;
  if (const auto* norm = dynamic_cast<const generated::LinalgVectorNormBackward0*>(&node))
    return has_constant_slope(norm->ord);
  if (const auto* norm = dynamic_cast<const generated::NormBackward0*>(&node))
    return has_constant_slope(norm->p);
  if (const auto* norm = dynamic_cast<const generated::NormBackward1*>(&node))
    return norm->p && has_constant_slope(*norm->p);
  if (const auto* distance = dynamic_cast<const generated::DistBackward0*>(&node))
    return has_constant_slope(distance->p);
  if (const auto* distances = dynamic_cast<const generated::CdistBackward0*>(&node))
    return has_constant_slope(distances->p);
  if (const auto* distances = dynamic_cast<const generated::PdistBackward0*>(&node))
    return has_constant_slope(distances->p);
  return false;
}

const torch::autograd::InputMetadata& made_by(const torch::autograd::Edge& edge) {
  return edge.function->input_metadata(edge.input_nr);
}
bool is_scalar(const torch::autograd::InputMetadata& made) { return made.shape_as_dim_vector().empty(); }

// Whether backward hands the numbers that it gets to input i: copied, moved, left out, added up, or
// multiplied by what does not depend on the inputs. Unknown functions of LibTorch are taken to; custom ones
// are not.
bool hands_on(const Node& node, std::size_t i) {
  if (!is_libtorchs(node)) return false;
  if (is_linear(node)) return true;
  const std::string function = function_of(node);
  if (functions_of_own_slope().count(function)) return false;
  const auto& edges = node.next_edges();
  if ((function == "Abs" || function == "Sgn" || function == "Angle") &&
      c10::isComplexType(c10::typeMetaToScalarType(made_by(edges[i]).dtype())))
    return false;  // a phase
  const auto product = products().find(function);
  if (product == products().end()) return true;
  const std::vector<std::size_t>& factors = product->second;
  if (std::find(factors.begin(), factors.end(), i) == factors.end()) return true;
  if ((function == "Div" || function == "Addcdiv") && i == factors.back())
    return false;  // of a / b: -a / b^2
  return std::none_of(factors.begin(), factors.end(), [&](std::size_t other) {
    return other != i && other < edges.size() && edges[other].is_valid() && !is_scalar(made_by(edges[other]));
  });
}

// Whether the elements of input i get exactly the upstream number, its negative or 0.
bool copies(const Node& node, std::size_t i) {
  const std::string function = function_of(node);
  if (!is_libtorchs(node) || !copying_functions().count(function)) return false;
  if (const auto* add = dynamic_cast<const generated::AddBackward0*>(&node);
      add && i == 1 && add->alpha.toDouble() != 1)
    return false;
  if (const auto* sub = dynamic_cast<const generated::SubBackward0*>(&node);
      sub && i == 1 && sub->alpha.toDouble() != 1)
    return false;
  // A tensor that is broadcast gets a sum.
  const bool elementwise = function == "Add" || function == "Sub" || function == "Where";
  return !elementwise ||
         node.input_metadata(0).shape_as_dim_vector() == made_by(node.next_edge(i)).shape_as_dim_vector();
}

bool is_exact_in_16_bits(double weight) {
  const auto single = static_cast<float>(weight);
  return single == weight && static_cast<float>(c10::BFloat16(single)) == single &&
         static_cast<float>(c10::Half(single)) == single;
}

}  // namespace

const std::set<std::string>& functions_of_own_slope() {
  static const std::set<std::string> functions = {
      "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atan2", "Atanh", "BatchNormNoUpdate", "BatchNormWithUpdate",
      "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "Cdist", "Celu", "Cos", "Cosh", "CtcLoss",
      "Cumprod", "Digamma", "Dist", "Elu", "Erf", "Erfc", "Erfinv", "EuclideanDist", "Exp", "Exp2", "Expm1",
      "Gelu", "Glu", "Hardswish", "HuberLoss", "Hypot", "I0", "Lgamma", "LinalgCholeskyEx", "LinalgDet",
      "LinalgEigh", "LinalgInvEx", "LinalgMatrixExp", "LinalgQr", "LinalgSlogdet", "LinalgSolveEx",
      "LinalgSvd", "LinalgVectorNorm", "Log", "Log10", "Log1P", "Log2", "LogSigmoid", "LogSoftmax",
      "Logaddexp", "Logaddexp2", "Logcumsumexp", "Logit", "Logsumexp", "MaskedSoftmax", "Mish", "MseLoss",
      "Mvlgamma", "NativeBatchNorm", "NativeBatchNormLegit", "NativeBatchNormLegitNoTraining",
      "NativeGroupNorm", "NativeLayerNorm", "Norm", "Pdist", "Polygamma", "Pow", "Prod", "Reciprocal",
      "Rsqrt", "SafeSoftmax", "ScaledDotProductFlashAttentionForCpu", "Sigmoid", "Silu", "Sin", "Sinc",
      "Sinh", "SmoothL1Loss", "SoftMarginLoss", "Softmax", "Softplus", "SpecialEntr", "SpecialErfcx",
      "SpecialI0E", "SpecialI1", "SpecialI1E", "SpecialLogNdtr", "SpecialNdtri", "SpecialXlog1Py", "Sqrt",
      "Std", "StdMean", "Tan", "Tanh", "Var", "VarMean", "WeightNormInterface", "Xlogy",
      // of other devices
      "CudnnAttention", "CudnnBatchNorm", "CudnnCtcLoss", "CudnnRnn", "EfficientAttention", "FlashAttention",
      "FusedRmsNorm", "MiopenBatchNorm", "MiopenCtcLoss", "MiopenRnn", "ScaledDotProductCudnnAttention",
      "ScaledDotProductEfficientAttention", "ScaledDotProductFlashAttention",
      "ScaledDotProductFusedAttentionOverrideable", "ThnnFusedGruCell", "ThnnFusedLstmCell"};
  return functions;
}

const std::set<std::string>& copying_functions() {
  static const std::set<std::string> functions = {
      "Abs",       "Add",          "Alias",      "Cat",          "Clamp", "ClampMin",
      "ClampMax",  "Clone",        "MaskedFill", "MaskedSelect", "Neg",   "Permute",
      "Relu",      "ReshapeAlias", "Select",     "Slice",        "Split", "SplitWithSizes",
      "Squeeze",   "Stack",        "Sub",        "Sum",          "T",     "ToCopy",
      "Transpose", "Unbind",       "UnsafeView", "Unsqueeze",    "View",  "Where"};
  return functions;
}

const std::map<std::string, std::vector<std::size_t>>& products() {
  static const std::vector<std::size_t> kBoth = {0, 1}, kAdded = {1, 2};
  static const auto functions = [] {
    std::map<std::string, std::vector<std::size_t>> all;
    for (const char* name : {"Bmm", "Convolution", "Div", "Dot", "LinalgCross", "Mm", "Mul", "Mv", "Vdot"})
      all[name] = kBoth;
    for (const char* name : {"Addbmm", "Addcdiv", "Addcmul", "Addmm", "Addmv", "Addr", "Baddbmm"})
      all[name] = kAdded;
    for (const char* name :  // of other devices and libraries
         {"ConvDepthwise2D", "CudnnConvolution", "Linear", "Matmul", "MiopenConvolution", "MkldnnConvolution",
          "MkldnnLinear", "SlowConv2D", "SlowConv3D"})
      all[name] = kBoth;
    return all;
  }();
  return functions;
}

In16Bits in_16_bits(const at::Tensor& sum) {
  const auto narrow = [](at::ScalarType type) { return type == at::kBFloat16 || type == at::kHalf; };
  if (narrow(sum.scalar_type())) return In16Bits::kSum;
  struct Place {
    Node* node;
    bool copied;  // all the way from the sum
  };
  std::vector<Place> places;
  std::unordered_map<Node*, bool> seen;  // whether by copies alone
  const auto visit = [&](Node* node, bool copied) {
    const auto [place, is_new] = seen.emplace(node, copied);
    if (!is_new && (copied || !place->second)) return;
    place->second = copied;
    places.push_back({node, copied});
  };
  if (sum.grad_fn()) visit(sum.grad_fn().get(), true);
  In16Bits found = In16Bits::kNothing;
  for (std::size_t p = 0; p < places.size(); ++p) {
    const auto [node, came_copied] = places[p];
    for (std::size_t i = 0; i < node->num_outputs(); ++i) {
      const auto& edge = node->next_edge(i);
      if (!edge.function || edge.function->next_edges().empty()) continue;  // a leaf keeps its own type
      const auto& made = made_by(edge);
      if (!is_scalar(made) && !hands_on(*node, i)) continue;
      const bool copied = came_copied && copies(*node, i);
      if (!narrow(c10::typeMetaToScalarType(made.dtype()))) {
        visit(edge.function.get(), copied);
      } else {
        if (is_scalar(made)) return In16Bits::kSum;
        found = std::max(found, copied ? In16Bits::kCopies : In16Bits::kMultiples);
      }
    }
  }
  return found;
}

void check_16_bits(const std::string& where, const LossTerm& term, bool deferred) {
  const In16Bits begins = in_16_bits(term.sum);
  if (begins == In16Bits::kNothing) return;
  if (!deferred)
    refuse(
        where, "a sum whose gradient begins in 16 bits, to which the division would be rounded",
        "losses in float32 or float64, and their sum",
        "Convert what the loss is computed from (log_softmax(logits.to(at::kFloat), 1)), or take isograd's losses, which do that themselves. Where all slopes are alike, as those of |x| and max(x, 0), compute the layer before the loss in float32 too, or take Deferred, which divides in float32 at the end");
  if (begins == In16Bits::kSum)
    refuse(where, "a raw sum that begins in 16 bits", "losses in float32 or float64, and their sum",
           "Convert the losses before they are added up (losses.to(at::kFloat).sum())");
  if (begins == In16Bits::kMultiples)
    refuse(
        where,
        "a raw sum whose gradient begins in 16 bits, to which what it is multiplied by would be rounded",
        "losses in float32 or float64; of others, their plain sum",
        "Convert what the loss is computed from (logits.to(at::kFloat)), or compute the layer before it in float32 too; without weights, choose tokens by masked_select or where");
  if (!is_exact_in_16_bits(term.weight))
    refuse(where, fmt::format("weight {} of a raw sum whose gradient begins in 16 bits", term.weight),
           "a weight that 16 bits hold, such as a power of two",
           "Change the weight, or compute the layer before the loss in float32 too");
}

}  // namespace isograd
