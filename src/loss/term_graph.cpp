#include "loss/term_graph.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <algorithm>
#include <cmath>
#include <typeinfo>

#include "base/refuse.hpp"

namespace isograd {
namespace {

using torch::autograd::Node;
namespace generated = torch::autograd::generated;

// Micro-batches of a rank: a factor that holds the count has shown itself by then.
constexpr int kMostLooks = 64;

bool near(double a, double b) {
  return std::abs(a - b) <= 1e-5 * std::abs(b);  // constants may be fp32
}

const torch::autograd::InputMetadata& made_by(const torch::autograd::Edge& edge) {
  return edge.function->input_metadata(edge.input_nr);
}
bool is_scalar(const torch::autograd::InputMetadata& made) { return made.shape_as_dim_vector().empty(); }

std::int64_t elements_made(const torch::autograd::Edge& edge) {
  std::int64_t elements = 1;
  for (const auto& size : made_by(edge).shape_as_dim_vector()) elements *= size.guard_int(__FILE__, __LINE__);
  return elements;
}

// A constant as one number: of one element, or the one value of all that are not 0.
std::optional<double> one_number(const torch::autograd::SavedVariable& saved) {
  at::Tensor value;
  try {
    value = saved.unpack();
  } catch (const c10::Error&) {  // changed since: backward says so
    return std::nullopt;
  }
  if (!value.defined() || value.is_complex() || value.numel() == 0) return std::nullopt;
  value = value.detach();
  if (value.numel() == 1) return value.to(at::kDouble).item<double>();
  const at::Tensor wide = value.to(at::kDouble), used = wide.masked_select(wide.ne(0));
  if (used.numel() == 0) return std::nullopt;
  const double smallest = used.min().item<double>(), largest = used.max().item<double>();
  return smallest == largest ? std::optional(largest) : std::nullopt;
}

// The factor by which a product or quotient multiplies its input i, where it is one constant number.
std::optional<double> factor_of(const Node& node, std::size_t i) {
  const auto constant = [&](std::size_t other) {
    return other >= node.num_outputs() || !node.next_edge(other).is_valid();
  };
  if (const auto* product = dynamic_cast<const generated::MulBackward0*>(&node))
    return constant(1 - i) ? one_number(i == 0 ? product->other_ : product->self_) : std::nullopt;
  if (const auto* product = dynamic_cast<const generated::MulBackward1*>(&node))
    return product->other.toDouble();
  if (const auto* quotient = dynamic_cast<const generated::DivBackward1*>(&node))
    return 1 / quotient->other.toDouble();
  if (const auto* quotient = dynamic_cast<const generated::DivBackward0*>(&node);
      quotient && i == 0 && constant(1))
    if (const auto divisor = one_number(quotient->other_)) return 1 / *divisor;
  return std::nullopt;
}

// The number of elements that a node's one number is the mean of; 0: it is no mean.
double mean_over(const Node& node) {
  if (const auto* mean = dynamic_cast<const generated::MeanBackward0*>(&node))
    return static_cast<double>(mean->self_sym_numel.guard_int(__FILE__, __LINE__));
  if (const auto* mean = dynamic_cast<const generated::MeanBackward1*>(&node))
    return static_cast<double>(mean->self_sym_numel.guard_int(__FILE__, __LINE__));
  const auto is_mean = [](const auto* loss) { return loss && loss->reduction == at::Reduction::Mean; };
  const auto of_classes = [&](const auto* loss) {  // rows, or the weights of those that have a target
    return is_mean(loss) ? one_number(loss->total_weight_).value_or(0) : 0.0;
  };
  const auto of_elements = [&]<typename... Losses>(const Losses*... losses) {
    return (is_mean(losses) || ...) ? static_cast<double>(elements_made(node.next_edge(0))) : 0.0;
  };
  return std::max({of_classes(dynamic_cast<const generated::NllLossBackward0*>(&node)),
                   of_classes(dynamic_cast<const generated::NllLoss2DBackward0*>(&node)),
                   of_elements(dynamic_cast<const generated::MseLossBackward0*>(&node),
                               dynamic_cast<const generated::SmoothL1LossBackward0*>(&node),
                               dynamic_cast<const generated::HuberLossBackward0*>(&node),
                               dynamic_cast<const generated::BinaryCrossEntropyBackward0*>(&node),
                               dynamic_cast<const generated::BinaryCrossEntropyWithLogitsBackward0*>(&node),
                               dynamic_cast<const generated::SoftMarginLossBackward0*>(&node),
                               dynamic_cast<const generated::MultiMarginLossBackward0*>(&node),
                               dynamic_cast<const generated::MultilabelMarginLossBackward0*>(&node))});
}

// Functions that a sum is looked through: each element of their input gets the number that their result got.
bool is_passed(const std::string& function) {
  return copying_functions().count(function) || function == "Index" || function == "Nansum" ||
         function == "Mul" || function == "Div";
}

// Where a way down from a term ends: at a mean, or at what differs between elements.
struct End {
  double mean_over = 0;  // 0: no mean
  double factor = 1;     // what everything above multiplies it by
  bool divided = false;  // a single division makes the factor, and it stands outside of the sum
  std::vector<double> factors{};
};

std::vector<End> ends_of(const at::Tensor& term) {
  struct Way {
    End so_far{};
    bool outside = true;  // of the sum: all from the term to here are single numbers
  };
  std::vector<End> ends;
  walk(term, Way(), [&](const Node& node, const Way& way, const auto& go) {
    if (way.outside)
      if (const double over = mean_over(node); over > 1) {
        ends.push_back(way.so_far);
        ends.back().mean_over = over;
        return;
      }
    std::string function = node.name();
    function = function.substr(0, function.find("Backward"));
    bool passed = false;
    for (std::size_t i = 0; i < node.num_outputs() && is_passed(function); ++i) {
      const auto& edge = node.next_edge(i);
      if (!edge.is_valid()) continue;
      End next = way.so_far;
      if (function == "Mul" || function == "Div") {
        const auto factor = factor_of(node, i);
        if (!factor) continue;
        if (way.outside) next.divided = function == "Div" && next.factors.empty();
        next.factor *= *factor;
        next.factors.push_back(*factor);
      }
      passed = true;
      go(edge, {std::move(next), elements_made(edge) == 1});
    }
    if (!passed) ends.push_back(way.so_far);
  });
  return ends;
}

struct Count {
  const char* of;
  double value;
};

std::vector<Count> counts_of(const Batch& batch) {
  std::vector<Count> counts = {{"valid targets", static_cast<double>(batch.num_targets())},
                               {"tokens", static_cast<double>(batch.num_tokens())},
                               {"samples", static_cast<double>(batch.num_fragments())}};
  for (const at::Tensor& weights : {batch.given_weights, batch.weights})
    if (weights.defined() && weights.is_cpu())
      counts.push_back({"weights", weights.detach().to(at::kDouble).sum().item<double>()});
  return counts;
}

// Whether the batch itself says that a token's loss is multiplied by this: w_i, or w_i / T_b under the sample
// mean, which is one over a count in a micro-batch of one sample.
bool is_weight(const Batch& batch, double factor) {
  for (const at::Tensor& weights : {batch.weights, batch.given_weights, batch.sample_weights})
    if (weights.defined() && weights.is_cpu() && weights.numel() > 0 &&
        (weights.detach().to(at::kDouble) - factor).abs().min().item<double>() <= 1e-5 * std::abs(factor))
      return true;
  return false;
}

// The number of losses in the micro-batch of which each may be a mean by itself.
std::int64_t units_of(const Batch& batch, Mean mean) {
  if (mean == Mean::kTokens) return batch.num_tokens();
  if (mean != Mean::kSamples && mean != Mean::kFixed) return batch.num_targets();
  const std::set<std::int64_t> samples(batch.sample_ids.begin(), batch.sample_ids.end());
  return std::min(batch.num_targets(), std::ssize(samples));
}

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
  if (const auto* norm = dynamic_cast<const generated::NormBackward1*>(&node))
    return norm->p && has_constant_slope(*norm->p);
  const auto by_p = [](const auto* found) { return found && has_constant_slope(found->p); };
  return by_p(dynamic_cast<const generated::NormBackward0*>(&node)) ||
         by_p(dynamic_cast<const generated::DistBackward0*>(&node)) ||
         by_p(dynamic_cast<const generated::CdistBackward0*>(&node)) ||
         by_p(dynamic_cast<const generated::PdistBackward0*>(&node));
}

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

void LocalMeans::look(const LossTerms& terms, const Batch& batch, const Normalizer& step) {
  // Divisors are read from the device, which a step otherwise waits for once.
  constexpr int kMostLooksAtDevices = 4;
  const bool on_cpu = std::ranges::all_of(terms, [](const LossTerm& term) { return term.sum.is_cpu(); });
  if (looks_ >= (on_cpu ? kMostLooks : kMostLooksAtDevices) || batch.num_targets() < 2) return;
  ++looks_;
  const std::vector<Count> counts = counts_of(batch);
  for (const LossTerm& term : terms) {
    const Mean mean = term.mean == Mean::kStep ? step.mean() : term.mean;
    const std::int64_t units = units_of(batch, mean);
    if (mean == Mean::kNone || mean == Mean::kMicroBatches || term.replicated || term.weight == 0 ||
        units < 2)
      continue;
    Term& known = terms_[term.name];
    known.mean = mean;
    ++known.looks;

    struct Sight {
      std::string key, said;
      double size, factor;  // of a mean
      bool certain;
    };
    std::vector<Sight> sights;
    std::vector<double> of_means, of_others;  // factors, of sums those of their means over the targets
    std::size_t suspicious = 0;
    for (const End& end : ends_of(term.sum)) {
      const auto is_count = [&](double factor) {
        return near(factor, end.mean_over) ||
               std::any_of(counts.begin(), counts.end(),
                           [&](const Count& count) { return count.value >= 2 && near(factor, count.value); });
      };
      if (end.mean_over > 1) {
        if (std::any_of(end.factors.begin(), end.factors.end(), is_count))
          continue;  // a mean times its count
        ++suspicious;
        const double factor = std::abs(end.factor);
        of_means.push_back(factor);
        sights.push_back({fmt::format("mean x {:.6g}", factor),
                          fmt::format("a mean over {:g} elements{}", end.mean_over,
                                      near(factor, 1) ? "" : fmt::format(", times {:g}", end.factor)),
                          end.mean_over, factor, near(factor, 1)});
        continue;
      }
      if (is_weight(batch, std::abs(end.factor))) continue;
      of_others.push_back(std::abs(end.factor) * counts.front().value);
      bool divided = false;
      for (const Count& count : counts)
        if (count.value >= 2 && near(std::abs(end.factor) * count.value, 1)) {
          divided = true;
          sights.push_back(
              {count.of, fmt::format("a sum divided by {:g}, the number of {}", count.value, count.of),
               count.value, 0, end.divided && count.value >= 3 && count.of != std::string("samples")});
        }
      suspicious += divided ? 1 : 0;
    }
    if (suspicious >= static_cast<std::size_t>(units)) continue;  // a mean of each, added up
    // Label smoothing makes the mean of a mean and another one: a, and (1 - a) / classes.
    for (const double a : of_means)
      for (const double b : of_others)
        if (const double classes = (1 - a) / b; classes > 1.5 && near(std::round(classes), classes))
          for (Sight& sight : sights) sight.certain = sight.certain || near(sight.factor, a);
    std::set<std::string> counted;
    for (const Sight& sight : sights) {
      Evidence& evidence = known.evidence[sight.key];
      if (evidence.looks == 0) evidence.size = sight.size, evidence.said = sight.said;
      evidence.varied = evidence.varied || !near(sight.size, evidence.size);
      evidence.certain = evidence.certain || sight.certain;
      if (counted.insert(sight.key).second) ++evidence.looks;
    }
  }
}

std::optional<ErrorText> LocalMeans::found() const {
  for (const auto& [name, term] : terms_)
    for (const auto& [key, evidence] : term.evidence)
      if (evidence.looks == term.looks && (evidence.certain || evidence.varied))
        return ErrorText{
            .where = fmt::format("loss term '{}'", name),
            .found = evidence.said + " of one micro-batch",
            .expected = fmt::format(
                "the sum over the micro-batch: the step divides it, once, by what all ranks have counted ({})",
                name_of(term.mean)),
            .action =
                "Return the sum (cross_entropy_sum, or at::Reduction::Sum). For a loss that is normalised already take NoDenominator, or Mean::kNone for the term. Give a constant factor of the loss as LossTerm::weight"};
  return std::nullopt;
}

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
  In16Bits found = In16Bits::kNothing;
  // The state: whether all the way from the sum is copies.
  const auto look = [&](const Node& node, bool came_copied, const auto& go) {
    for (std::size_t i = 0; i < node.num_outputs(); ++i) {
      const auto& edge = node.next_edge(i);
      if (!edge.function || edge.function->next_edges().empty()) continue;  // a leaf keeps its own type
      const auto& made = made_by(edge);
      if (!is_scalar(made) && !hands_on(node, i)) continue;
      const bool copied = came_copied && copies(node, i);
      if (!narrow(c10::typeMetaToScalarType(made.dtype())))
        go(edge, copied);
      else
        found = std::max(found, is_scalar(made) ? In16Bits::kSum
                                : copied        ? In16Bits::kCopies
                                                : In16Bits::kMultiples);
    }
  };
  walk(sum, true, look, [](bool copied, bool copied_now) { return copied && !copied_now; });
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
