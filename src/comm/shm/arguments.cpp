#include "comm/shm/arguments.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/refuse.hpp"
#include "base/torch_versions.hpp"
#include "isograd/error.hpp"

namespace isograd::shm {
namespace {

using kernels::Combine;
using kernels::Number;

constexpr const char* kNumbers =
    "float64, float32, bfloat16, float16, int64, int32, int16, int8, uint8 or bool";

bool to_number(at::ScalarType type, Number& number) {
  switch (type) {
    case at::kDouble:
      return number = Number::kFloat64, true;
    case at::kFloat:
      return number = Number::kFloat32, true;
    case at::kBFloat16:
      return number = Number::kBFloat16, true;
    case at::kHalf:
      return number = Number::kFloat16, true;
    case at::kLong:
      return number = Number::kInt64, true;
    case at::kInt:
      return number = Number::kInt32, true;
    case at::kShort:
      return number = Number::kInt16, true;
    case at::kChar:
      return number = Number::kInt8, true;
    case at::kByte:
      return number = Number::kUInt8, true;
    case at::kBool:
      return number = Number::kBool, true;
    default:
      return false;
  }
}

// In the order of c10d::ReduceOp::RedOpType. Only PyTorch uses AVG and PREMUL_SUM.
constexpr struct {
  c10d::ReduceOp::RedOpType op;
  Combine combine;
  const char* name;
} kOperations[] = {{c10d::ReduceOp::SUM, Combine::kSum, "SUM"},
                   {c10d::ReduceOp::AVG, Combine::kAverage, "AVG"},
                   {c10d::ReduceOp::PRODUCT, Combine::kProduct, "PRODUCT"},
                   {c10d::ReduceOp::MIN, Combine::kMin, "MIN"},
                   {c10d::ReduceOp::MAX, Combine::kMax, "MAX"},
                   {c10d::ReduceOp::BAND, Combine::kAnd, "BAND"},
                   {c10d::ReduceOp::BOR, Combine::kOr, "BOR"},
                   {c10d::ReduceOp::BXOR, Combine::kXor, "BXOR"},
                   {c10d::ReduceOp::PREMUL_SUM, Combine::kScaledSum, "PREMUL_SUM"}};

std::string shape(const at::Tensor& tensor) {
  return fmt::format("{} elements of {}", tensor.numel(), c10::toString(tensor.scalar_type()));
}

}  // namespace

void Arguments::refuse(const std::string& found, const std::string& expected,
                       const std::string& action) const {
  isograd::refuse(
      fmt::format("{} of group '{}' ({}) on rank {} of {}", operation_, group_, backend_, rank_, size_),
      found, expected, action);
}

Region Arguments::piece(const at::Tensor& tensor) const {
  const bool usable = tensor.defined() && tensor.device().is_cpu() && tensor.layout() == at::kStrided &&
                      tensor.is_contiguous();
  if (!usable) {
    refuse(!tensor.defined()           ? "an undefined tensor"
           : !tensor.device().is_cpu() ? "a tensor on " + tensor.device().str()
                                       : "a tensor that is not contiguous",
           "a contiguous tensor on the CPU",
           "Call contiguous() or cpu() first, or give the group a backend of that device");
  }
  return {static_cast<std::byte*>(tensor.data_ptr()), static_cast<std::uint64_t>(tensor.nbytes())};
}

const at::Tensor& Arguments::only(const Tensors& tensors) const {
  if (tensors.size() != 1) {
    refuse(fmt::format("{} tensors", tensors.size()), "one tensor", "Call it once for each tensor");
  }
  return tensors[0];
}

void Arguments::as_many(std::size_t outputs, std::size_t inputs) const {
  if (outputs == inputs) return;
  refuse(fmt::format("{} outputs for {} inputs", outputs, inputs), "as many outputs as inputs",
         "Give one output for each input");
}

void Arguments::same_size(const at::Tensor& whole, const at::Tensor& own) const {
  if (whole.numel() == own.numel()) return;
  refuse(fmt::format("an output of {} elements for this rank's part of {}", whole.numel(), own.numel()),
         "as many elements", "Size the outputs after the ranks' parts");
}

void Arguments::one_for_each(const Tensors& tensors) const {
  if (tensors.size() == static_cast<std::size_t>(size_)) return;
  refuse(fmt::format("a list of {} tensors", tensors.size()), fmt::format("{}, one for each rank", size_),
         "Give one tensor for each rank");
}

const Tensors& Arguments::one_list(const std::vector<Tensors>& lists) const {
  if (lists.size() != 1) refuse(fmt::format("{} lists of tensors", lists.size()), "one", "Give one list");
  one_for_each(lists[0]);
  return lists[0];
}

std::vector<Region> Arguments::list(const Tensors& tensors, const at::Tensor& like,
                                    std::int64_t count) const {
  one_for_each(tensors);
  std::vector<Region> pieces;
  for (const at::Tensor& tensor : tensors) {
    pieces.push_back(piece(tensor));
    same_type(tensor, like);
    if (count >= 0 && tensor.numel() != count) {
      refuse("a list with a tensor of " + shape(tensor), fmt::format("{} elements in each", count),
             "Make them alike, or use an operation whose parts may differ");
    }
  }
  return pieces;
}

std::vector<Region> Arguments::cut(const at::Tensor& whole, const at::Tensor& part) const {
  same_type(whole, part);
  if (whole.numel() != part.numel() * size_) {
    refuse(fmt::format("{} in all and {} for each rank", shape(whole), shape(part)),
           fmt::format("{} times as many elements in all", size_),
           "Pad the data to a multiple of the group's size, or use an operation whose parts may differ");
  }
  const Region all = piece(whole);
  std::vector<Region> pieces;
  for (int r = 0; r < size_; ++r) {
    pieces.push_back({all.data + static_cast<std::size_t>(r) * part.nbytes(), part.nbytes()});
  }
  return pieces;
}

std::vector<Region> Arguments::cut_rows(const at::Tensor& whole,
                                        const std::vector<std::int64_t>& splits) const {
  const Region all = piece(whole);
  const std::int64_t rows = whole.dim() > 0 ? whole.size(0) : 1;
  const std::uint64_t row_bytes = rows > 0 ? all.bytes / static_cast<std::uint64_t>(rows) : 0;
  std::int64_t sum = 0;
  bool sound = splits.empty() ? rows % size_ == 0 : splits.size() == static_cast<std::size_t>(size_);
  for (std::int64_t split : splits) {
    sound = sound && split >= 0 && split <= rows - sum;
    sum += split;
  }
  if (!sound || (!splits.empty() && sum != rows)) {
    refuse(fmt::format("{} rows, cut into [{}]", rows, fmt::join(splits, ", ")),
           splits.empty() ? fmt::format("a number of rows that {} divides", size_)
                          : fmt::format("{} parts that are {} rows together", size_, rows),
           "Give the number of rows for each rank");
  }
  std::vector<Region> pieces;
  std::byte* data = all.data;
  for (int r = 0; r < size_; ++r) {
    const std::int64_t part = splits.empty() ? rows / size_ : splits[static_cast<std::size_t>(r)];
    pieces.push_back({data, static_cast<std::uint64_t>(part) * row_bytes});
    data += pieces.back().bytes;
  }
  return pieces;
}

void Arguments::check_disjoint(const Region& own, const std::vector<Region>& others, bool may_share) const {
  for (std::size_t r = 0; r < others.size(); ++r) {
    const Region& other = others[r];
    const bool overlap = own.bytes > 0 && other.bytes > 0 && own.data < other.data + other.bytes &&
                         other.data < own.data + own.bytes;
    if (!overlap || (may_share && static_cast<int>(r) == rank_ && own.data == other.data)) continue;
    refuse("an input and an output that overlap",
           "separate memory, except for the part that a rank has for itself", "Give it an output of its own");
  }
}

void Arguments::check_disjoint(const std::vector<Region>& inputs, const std::vector<Region>& outputs) const {
  for (std::size_t r = 0; r < inputs.size(); ++r)
    check_disjoint(inputs[r], outputs, static_cast<int>(r) == rank_);
}

void Arguments::same_type(const at::Tensor& a, const at::Tensor& b) const {
  if (a.scalar_type() == b.scalar_type()) return;
  refuse(fmt::format("tensors of {} and {}", c10::toString(a.scalar_type()), c10::toString(b.scalar_type())),
         "one type", "Convert one of them");
}

int Arguments::root(std::int64_t rank) const {
  if (rank < 0 || rank >= size_) {
    refuse(fmt::format("root {}", rank), fmt::format("0 to {}", size_ - 1), "Name a rank of the group");
  }
  return static_cast<int>(rank);
}

int Arguments::peer(int rank) const {
  if (rank < 0 || rank >= size_ || rank == rank_) {
    refuse(fmt::format("rank {} as the other end", rank),
           fmt::format("a rank from 0 to {} that is not this one", size_ - 1),
           "Name another rank of the group");
  }
  return rank;
}

Reduction Arguments::reduction(const at::Tensor& tensor, const c10d::ReduceOp& op) const {
  Reduction reduction{Number::kFloat32, Combine::kSum};
  if (!to_number(tensor.scalar_type(), reduction.number)) {
    refuse(fmt::format("a tensor of {}", c10::toString(tensor.scalar_type())), kNumbers,
           "Convert the tensor first");
  }
  for (const auto& each : kOperations) {
    if (each.op != op.op_) continue;
    reduction.combine = each.combine;
    if (!kernels::can_combine(reduction.number, reduction.combine)) {
      refuse(fmt::format("{} of {}", each.name, c10::toString(tensor.scalar_type())),
             "PREMUL_SUM of floats, BAND, BOR and BXOR of integers or bool, AVG of anything but bool",
             "Convert the tensor or choose another reduction");
    }
    if (reduction.combine == Combine::kScaledSum) {
      const auto* scale = dynamic_cast<const torch_versions::PreMulSum*>(op.supplement_.get());
      if (!scale) refuse("PREMUL_SUM without a factor", "a factor", "Make it with _make_nccl_premul_sum");
      reduction.factor =
          scale->tensor_factor.defined() ? scale->tensor_factor.item().toDouble() : scale->double_factor;
    }
    return reduction;
  }
  refuse(fmt::format("reduction number {} of c10d", static_cast<int>(op.op_)), "one that c10d names",
         "Use SUM, MAX, MIN or PRODUCT");
}

}  // namespace isograd::shm
