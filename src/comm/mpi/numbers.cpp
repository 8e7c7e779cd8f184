#include "comm/mpi/numbers.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <numeric>

#include "base/refuse.hpp"
#include "base/torch_versions.hpp"
#include "isograd/error.hpp"

namespace isograd::mpi {
namespace {

[[noreturn]] void refuse_number(const std::string& where, const std::string& found,
                                const std::string& expected) {
  refuse(where, found, expected, "Convert the tensor first");
}

bool has_16_bits(at::ScalarType type) {
  return type == at::kHalf || type == at::kBFloat16;
}

MPI_Datatype number_type(at::ScalarType type, const std::string& where) {
  switch (type) {
    case at::kDouble:
      return MPI_DOUBLE;
    case at::kFloat:
      return MPI_FLOAT;
    case at::kLong:
      return MPI_INT64_T;
    case at::kInt:
      return MPI_INT32_T;
    case at::kShort:
      return MPI_INT16_T;
    case at::kChar:
      return MPI_INT8_T;
    case at::kByte:
      return MPI_UINT8_T;
    case at::kBool:
      return MPI_C_BOOL;
    default:
      refuse_number(where, fmt::format("a tensor of {}", c10::toString(type)),
                    "float64, float32, bfloat16, float16, int64, int32, int16, int8, uint8 or bool");
  }
}

// For bool a sum is "or" and a product is "and".
MPI_Op operation_of(c10d::ReduceOp::RedOpType op, at::ScalarType type, const std::string& where) {
  const bool logical = type == at::kBool, integral = c10::isIntegralType(type, /*includeBool=*/true);
  switch (op) {
    case c10d::ReduceOp::SUM:
      return logical ? MPI_LOR : MPI_SUM;
    case c10d::ReduceOp::PRODUCT:
      return logical ? MPI_LAND : MPI_PROD;
    case c10d::ReduceOp::MAX:
      return logical ? MPI_LOR : MPI_MAX;
    case c10d::ReduceOp::MIN:
      return logical ? MPI_LAND : MPI_MIN;
    case c10d::ReduceOp::AVG:
      if (!logical) return MPI_SUM;
      break;
    case c10d::ReduceOp::PREMUL_SUM:
      if (!integral) return MPI_SUM;
      break;
    case c10d::ReduceOp::BAND:
      if (integral) return logical ? MPI_LAND : MPI_BAND;
      break;
    case c10d::ReduceOp::BOR:
      if (integral) return logical ? MPI_LOR : MPI_BOR;
      break;
    case c10d::ReduceOp::BXOR:
      if (integral) return logical ? MPI_LXOR : MPI_BXOR;
      break;
    default:
      break;
  }
  refuse_number(where,
                fmt::format("reduction number {} of c10d on {}", static_cast<int>(op), c10::toString(type)),
                "SUM, MAX, MIN, PRODUCT; AVG of numbers, PREMUL_SUM of floating-point numbers; BAND, "
                "BOR, BXOR of integers");
}

}  // namespace

MPI_Datatype copied_type(const at::Tensor& tensor, const std::string& where) {
  switch (tensor.element_size()) {
    case 1:
      return MPI_UINT8_T;
    case 2:
      return MPI_UINT16_T;
    case 4:
      return MPI_UINT32_T;
    case 8:
      return MPI_UINT64_T;
    case 16:
      return MPI_C_DOUBLE_COMPLEX;
    default:
      refuse_number(where, fmt::format("a tensor of {}", c10::toString(tensor.scalar_type())),
                    "elements of 1, 2, 4, 8 or 16 bytes");
  }
}

void* data_of(const at::Tensor& tensor) {
  static std::uint64_t nothing[2] = {};
  return tensor.numel() > 0 ? tensor.data_ptr() : nothing;
}

void* at_element(const at::Tensor& tensor, std::int64_t element) {
  return static_cast<char*>(data_of(tensor)) + element * tensor.element_size();
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  const auto* first = static_cast<const char*>(data_of(a));
  const auto* second = static_cast<const char*>(data_of(b));
  return a.numel() > 0 && b.numel() > 0 && first < second + b.nbytes() && second < first + a.nbytes();
}

std::vector<std::int64_t> sizes_of(const std::vector<at::Tensor>& tensors) {
  std::vector<std::int64_t> sizes;
  for (const at::Tensor& tensor : tensors) sizes.push_back(tensor.numel());
  return sizes;
}

at::Tensor joined(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> flat;
  for (const at::Tensor& tensor : tensors) flat.push_back(tensor.detach().reshape({-1}));
  return at::cat(flat);
}

at::Tensor place_for(const std::vector<at::Tensor>& tensors) {
  const auto sizes = sizes_of(tensors);
  return at::empty({std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0})},
                   tensors[0].options().requires_grad(false));
}

void distribute(const at::Tensor& flat, const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  std::int64_t begin = 0;
  for (const at::Tensor& tensor : tensors) {
    tensor.copy_(flat.narrow(0, begin, tensor.numel()).view(tensor.sizes()));
    begin += tensor.numel();
  }
}

Operand operand(const at::Tensor& tensor, const c10d::ReduceOp& op, const std::string& where) {
  const at::NoGradGuard no_grad;
  const at::ScalarType type = has_16_bits(tensor.scalar_type()) ? at::kFloat : tensor.scalar_type();
  Operand form;
  form.type = number_type(type, where);
  form.operation = operation_of(op.op_, type, where);
  form.mean = op.op_ == c10d::ReduceOp::AVG;
  form.tensor = tensor.scalar_type() == type ? tensor : tensor.to(type);
  if (op.op_ == c10d::ReduceOp::PREMUL_SUM) {
    const auto* supplement = dynamic_cast<const torch_versions::PreMulSum*>(op.supplement_.get());
    if (!supplement) refuse_number(where, "PREMUL_SUM without a factor", "a factor");
    const at::Tensor& given = supplement->tensor_factor;
    form.tensor = form.tensor.mul(given.defined() ? given.item<double>() : supplement->double_factor);
  }
  return form;
}

void deliver(const Operand& form, const at::Tensor& combined, const at::Tensor& result, int size) {
  const at::NoGradGuard no_grad;
  if (form.mean && at::isFloatingType(combined.scalar_type())) combined.div_(size);
  if (form.mean && !at::isFloatingType(combined.scalar_type())) combined.div_(size, "trunc");
  if (!combined.is_same(result)) result.copy_(combined.view(result.sizes()));
}

}  // namespace isograd::mpi
