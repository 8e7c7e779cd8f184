#include "kernels/matmul/product.hpp"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <utility>

#include "base/refuse.hpp"
#include "kernels/matmul/brgemm.hpp"
#include "kernels/matmul/row_invariant.hpp"

namespace isograd {
namespace {

// LibTorch registers its oneDNN product (made for compiled graphs) by name only.
using Linear = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                          std::string_view, c10::List<std::optional<at::Scalar>>,
                          std::optional<std::string_view>);
using LinearPlus = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                              const std::optional<at::Tensor>&, std::string_view);

struct OneDnn {
  c10::TypedOperatorHandle<Linear> linear;
  c10::TypedOperatorHandle<LinearPlus> linear_plus;
};

// Absent in builds of LibTorch without oneDNN.
const std::optional<OneDnn>& one_dnn() {
  static const std::optional<OneDnn> found = []() -> std::optional<OneDnn> {
    if (!at::hasMKLDNN()) return std::nullopt;
    auto& dispatcher = c10::Dispatcher::singleton();
    const auto linear = dispatcher.findSchema({"mkldnn::_linear_pointwise", ""});
    const auto linear_plus = dispatcher.findSchema({"mkldnn::_linear_pointwise", "binary"});
    if (!linear || !linear_plus) return std::nullopt;
    return OneDnn{linear->typed<Linear>(), linear_plus->typed<LinearPlus>()};
  }();
  return found;
}

constexpr std::int64_t kFewRows = 8;           // with fewer, preparing the operands costs more than it saves
thread_local bool rows_are_invariant = false;  // RowInvariantProducts
constexpr double kFewMultiplications = 1 << 15;  // brgemm's calls cost as much as about 10,000
// For a new shape oneDNN prepares for about 0.6 ms and keeps a kernel; in that time a core multiplies 2^25
// pairs. It must gain that before it is used for groups of tokens, whose shapes differ in each layer and
// step.
constexpr double kManyMultiplications = 1 << 29;

at::Tensor by_one_dnn(const at::Tensor& a, const at::Tensor& b, const at::Tensor& addend,
                      const at::Tensor& bias) {
  // The operator reads the bias as if its elements were contiguous.
  const std::optional<at::Tensor> row = bias.defined() ? std::optional(bias.contiguous()) : std::nullopt;
  if (addend.defined()) return one_dnn()->linear_plus.call(a, addend, b, row, "add");
  return one_dnn()->linear.call(a, b, row, "none", c10::List<std::optional<at::Scalar>>(), "");
}

// 0, 1, 2, 3, 4 minus 2, repeated: sums of few products of them are exact in every type.
at::Tensor small_numbers(at::IntArrayRef shape) {
  const auto options = at::TensorOptions().dtype(at::kDouble);
  return at::arange(c10::multiply_integers(shape), options).remainder(5).sub(2).view(shape);
}

// The types that oneDNN multiplies depend on the processor (bf16: only with AVX-512 or newer instructions),
// and it reports that by failing. So each type is tried once, in every form of product in use.
bool one_dnn_computes(at::ScalarType type) {
  if (!one_dnn()) return false;
  const at::NoGradGuard no_grad;
  const at::Tensor a = small_numbers({kFewRows, 11}), b = small_numbers({6, 11}),
                   addend = small_numbers({kFewRows, 6}), bias = small_numbers({6});
  try {
    for (const bool adds : {false, true})
      for (const bool has_bias : {false, true})
        for (const bool turned : {false, true}) {
          const auto of = [&](const at::Tensor& x) {
            return turned ? x.t().contiguous().t().to(type) : x.to(type);
          };
          const at::Tensor plus = adds ? addend : at::Tensor(), row = has_bias ? bias : at::Tensor();
          const at::Tensor found =
              by_one_dnn(of(a), of(b), adds ? addend.to(type) : plus, has_bias ? bias.to(type) : row);
          if (!found.to(at::kDouble).equal(naive_twin::product(a, b, plus, row))) return false;
        }
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

bool takes_one_dnn(at::ScalarType type) {
  static const bool single = one_dnn_computes(at::kFloat), half = one_dnn_computes(at::kBFloat16);
  return type == at::kFloat ? single : type == at::kBFloat16 && half;
}

// oneDNN's bf16 kernels for AMX sum over blocks of at most 32 numbers. What a row lacks of its last block
// they read from the next row and multiply by 0: a NaN or an infinity there reaches this row.
bool short_blocks_read_the_next_row() {
  static const bool found = [] {
    const at::NoGradGuard no_grad;
    const at::Tensor a = at::zeros({64, 3}, at::kBFloat16);
    a.select(0, 1).fill_(std::nan(""));
    const at::Tensor made = by_one_dnn(a, at::zeros({16, 3}, at::kBFloat16), {}, {});
    return made.select(0, 0).isnan().any().item<bool>();
  }();
  return found;
}

at::Tensor in_whole_blocks(const at::Tensor& x) {
  const std::int64_t block = x.size(1) <= 32 ? 2 : 32, rest = x.size(1) % block;
  return rest == 0 ? x : at::constant_pad_nd(x, {0, block - rest});
}

// A matrix in rows or transposed, whose elements do not share memory.
at::Tensor dense(const at::Tensor& x) {
  const auto are_dense = [&](int outer, int inner) {
    return x.stride(inner) == 1 && (x.size(outer) == 1 || x.stride(outer) >= x.size(inner));
  };
  return are_dense(0, 1) || are_dense(1, 0) ? x : x.contiguous();
}

Operand operand(const at::Tensor& x) {
  const bool turned = x.stride(1) != 1 || (x.size(0) > 1 && x.stride(0) < x.size(1));
  // The stride of a single row may be any number.
  return {.data = x.const_data_ptr<float>(),
          .stride = std::max(x.stride(turned ? 1 : 0), x.size(turned ? 0 : 1)),
          .turned = turned};
}

void by_brgemm(const at::Tensor& result, const at::Tensor& a, const at::Tensor& b, bool adds) {
  const at::Tensor dense_a = dense(a), dense_b = dense(b);
  multiply_by_brgemm(
      a.size(0), b.size(0), a.size(1), operand(dense_a), operand(dense_b),
      {.data = result.mutable_data_ptr<float>(), .stride = std::max(result.stride(0), result.size(1))}, adds);
}

bool takes_brgemm(const at::Tensor& a, const at::Tensor& b) {
  const double multiplications = static_cast<double>(a.numel()) * static_cast<double>(b.size(0));
  return a.is_cpu() && a.scalar_type() == at::kFloat &&
         (rows_are_invariant || multiplications >= kFewMultiplications) &&
         multiplier_of(a) == Multiplier::kBrgemm;
}

// bf16 numbers multiplied in fp32 and rounded once, as bf16 kernels do. LibTorch's own bf16 product is
// several times slower on processors without bf16 instructions.
at::Tensor widened(const at::Tensor& a, const at::Tensor& b, const at::Tensor& addend,
                   const at::Tensor& bias) {
  const auto wide = [](const at::Tensor& x) { return x.defined() ? x.to(at::kFloat) : x; };
  return product(wide(a), wide(b), wide(addend), wide(bias)).to(at::kBFloat16);
}

}  // namespace

std::string_view name_of(Multiplier multiplier) {
  switch (multiplier) {
    case Multiplier::kBlas: return "blas";
    case Multiplier::kOneDnn: return "onednn";
    case Multiplier::kBrgemm: return "brgemm";
    default: return "rule";
  }
}

Multiplier multiplier_of_variable() {
  const char* variable = std::getenv(kMultiplierVariable);
  const std::string_view text = variable ? variable : "";
  if (text.empty()) return Multiplier::kByRule;
  for (const Multiplier one :
       {Multiplier::kByRule, Multiplier::kBlas, Multiplier::kOneDnn, Multiplier::kBrgemm})
    if (text == name_of(one)) return one;
  refuse(kMultiplierVariable, variable, "rule, blas, onednn or brgemm", "Unset the variable, or correct it");
}

Multiplier& multiplier() {
  static Multiplier chosen = multiplier_of_variable();
  return chosen;
}

bool products_by_brgemm() {
  return multiplier() == Multiplier::kBrgemm || (multiplier() == Multiplier::kByRule && has_brgemm());
}

Multiplier multiplier_of(const at::Tensor& a) {
  if (products_by_brgemm()) return Multiplier::kBrgemm;
  if (multiplier() != Multiplier::kByRule) return multiplier();
  return a.stride(0) == 1 && a.stride(1) != 1 ? Multiplier::kBlas : Multiplier::kOneDnn;
}

at::Tensor product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& addend,
                   const at::Tensor& bias) {
  if (takes_brgemm(a, b)) {
    at::Tensor result = at::empty({a.size(0), b.size(0)}, a.options());
    if (addend.defined() && bias.defined())
      at::add_out(result, addend, bias);
    else if (addend.defined() || bias.defined())
      result.copy_(addend.defined() ? addend : bias);
    by_brgemm(result, a, b, addend.defined() || bias.defined());
    return result;
  }
  const auto type = a.scalar_type();
  if (a.is_cpu() && a.size(0) >= kFewRows && a.numel() > 0 && b.numel() > 0 &&
      at::globalContext().userEnabledMkldnn()) {
    const bool by_library = type == at::kBFloat16 || multiplier_of(a) == Multiplier::kOneDnn;
    if (by_library && takes_one_dnn(type)) {
      if (type == at::kBFloat16 && short_blocks_read_the_next_row())
        return by_one_dnn(in_whole_blocks(a), in_whole_blocks(b), addend, bias);
      return by_one_dnn(a, b, addend, bias);
    }
    if (type == at::kBFloat16) return widened(a, b, addend, bias);
  }
  return naive_twin::product(a, b, addend, bias);
}

void multiply_into(const at::Tensor& result, const at::Tensor& a, const at::Tensor& b, bool adds) {
  if (takes_brgemm(a, b)) return by_brgemm(result, a, b, adds);
  const bool many =
      static_cast<double>(result.numel()) * static_cast<double>(a.size(1)) >= kManyMultiplications;
  const bool by_one_dnn = a.scalar_type() == at::kFloat && multiplier_of(a) == Multiplier::kOneDnn &&
                          (many || multiplier() == Multiplier::kOneDnn);
  at::Tensor to = result;
  if (a.is_cpu() && (a.scalar_type() == at::kBFloat16 || by_one_dnn))
    to.copy_(product(a, b, adds ? result : at::Tensor()));
  else if (adds)
    to.addmm_(a, b.t());
  else
    at::mm_out(to, a, b.t());
}

void multiply_widening_into(const at::Tensor& result, const at::Tensor& a, const at::Tensor& b, bool adds) {
  at::Tensor to = result;
  if (adds)
    at::addmm_out(to, result, a, b.t(), at::kFloat);
  else
    at::mm_out(to, a, b.t(), at::kFloat);
}

bool products_widen(at::Device device) {
  if (!device.is_cuda()) return false;
  // LibTorch reports unsupported products by failing.
  static const bool found = [&] {
    const at::NoGradGuard no_grad;
    const auto options = at::TensorOptions().device(device);
    const at::Tensor operand = at::zeros({16, 16}, options.dtype(at::kBFloat16)),
                     result = at::zeros({16, 16}, options.dtype(at::kFloat));
    try {
      for (const bool adds : {false, true}) multiply_widening_into(result, operand, operand, adds);
    } catch (const c10::Error& error) {
      const std::string why = error.what_without_backtrace();
      TORCH_WARN("isograd: gradients of bf16 weights are rounded to bf16 before they are added up in fp32: ",
                 why.substr(0, why.find('\n')));
      return false;
    }
    return true;
  }();
  return found;
}

namespace naive_twin {

at::Tensor product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& addend,
                   const at::Tensor& bias) {
  at::Tensor result;
  if (bias.defined())
    result = at::addmm(bias, a, b.t());
  else
    return addend.defined() ? at::addmm(addend, a, b.t()) : at::mm(a, b.t());
  return addend.defined() ? result.add_(addend) : result;
}

}  // namespace naive_twin
RowInvariantProducts::RowInvariantProducts() : before_(std::exchange(rows_are_invariant, true)) {}
RowInvariantProducts::~RowInvariantProducts() { rows_are_invariant = before_; }

}  // namespace isograd
