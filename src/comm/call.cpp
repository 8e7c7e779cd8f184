#include "comm/call.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstring>

#include "base/refuse.hpp"
#include "base/torch_versions.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

using kernels::Combine;
using kernels::Number;

constexpr std::pair<at::ScalarType, Number> kNumbers[] = {
    {at::kDouble, Number::kFloat64}, {at::kFloat, Number::kFloat32}, {at::kBFloat16, Number::kBFloat16},
    {at::kHalf, Number::kFloat16},   {at::kLong, Number::kInt64},    {at::kInt, Number::kInt32},
    {at::kShort, Number::kInt16},    {at::kChar, Number::kInt8},     {at::kByte, Number::kUInt8},
    {at::kBool, Number::kBool}};

// Only PyTorch uses AVG and PREMUL_SUM.
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

std::string Call::where() const {
  std::string text = fmt::format("{} of group '{}'", operation_, group_);
  if (*backend_) text += fmt::format(" ({})", backend_);
  text += fmt::format(" on rank {} of {}", rank_, size_);
  if (!site_.file) return text;
  const char* slash = std::strrchr(site_.file, '/');
  return text + fmt::format(" at {}:{}", slash ? slash + 1 : site_.file, site_.line);
}

void Call::refuse(const std::string& found, const std::string& expected, const std::string& action) const {
  isograd::refuse(where(), found, expected, action);
}

void Call::dense(const at::Tensor& tensor, const char* which) const {
  if (tensor.defined() && tensor.layout() == at::kStrided) return;
  refuse(fmt::format("{} {}", tensor.defined() ? "a sparse" : "an undefined", which),
         "a dense tensor on the backend's device", "Give one");
}

void Call::has_rows(const at::Tensor& tensor, const char* which) const {
  if (tensor.dim() > 0) return;
  refuse(fmt::format("an {} without dimensions", which), "one with rows (dim 0)", "Call unsqueeze(0) first");
}

void Call::even_rows(std::int64_t total) const {
  if (total % size_ == 0) return;
  refuse(fmt::format("a tensor of {} rows without numbers of rows", total),
         fmt::format("rows that {} ranks can share evenly", size_),
         "Give the numbers of rows to and from each rank");
}

void Call::rows(const Rows& rows, std::int64_t total, const char* which) const {
  std::int64_t sum = 0;
  bool sound = rows.size() == static_cast<std::size_t>(size_);
  for (const std::int64_t part : rows) {
    sound = sound && part >= 0 && part <= total - sum;
    sum += part;
  }
  if (sound && sum == total) return;
  refuse(fmt::format("{} [{}] for {} rows", which, fmt::join(rows, ", "), total),
         fmt::format("a number for each of {} ranks, {} together", size_, total),
         "Count the rows of each rank (split_rows gives the most even numbers)");
}

void Call::stack(const at::Tensor& whole, const char* which, std::int64_t first, const at::Tensor& part,
                 std::size_t skip) const {
  std::vector<std::int64_t> sizes = part.sizes().slice(skip).vec();
  sizes.insert(sizes.begin(), first);
  if (whole.sizes() == sizes && whole.scalar_type() == part.scalar_type()) return;
  const auto text = [](at::IntArrayRef lengths, at::ScalarType type) {
    return fmt::format("[{}] of {}", fmt::join(lengths, ", "), c10::toString(type));
  };
  refuse(fmt::format("an {} {}", which, text(whole.sizes(), whole.scalar_type())),
         text(sizes, part.scalar_type()), fmt::format("Make the {} of these sizes, or view it so", which));
}

void Call::same_type(const at::Tensor& a, const at::Tensor& b) const {
  if (a.scalar_type() == b.scalar_type()) return;
  refuse(fmt::format("tensors of {} and {}", c10::toString(a.scalar_type()), c10::toString(b.scalar_type())),
         "one type", "Convert one of them");
}

int Call::root(std::int64_t rank) const {
  if (rank >= 0 && rank < size_) return static_cast<int>(rank);
  refuse(fmt::format("root {}", rank), fmt::format("0 to {}", size_ - 1), "Name a rank of the group");
}

int Call::peer(int rank) const {
  if (rank >= 0 && rank < size_ && rank != rank_) return rank;
  refuse(fmt::format("rank {} as the other end", rank),
         fmt::format("a rank from 0 to {} that is not this one", size_ - 1),
         "Name another rank of the group");
}

void Call::message(int other, int tag) const {
  peer(other);
  if (tag < 0) refuse(fmt::format("tag {}", tag), "0 or more", "Choose another tag");
}

Number Call::number(const at::Tensor& tensor) const {
  for (const auto& [type, number] : kNumbers)
    if (type == tensor.scalar_type()) return number;
  refuse(fmt::format("a tensor of {}", c10::toString(tensor.scalar_type())),
         "float64, float32, bfloat16, float16, int64, int32, int16, int8, uint8 or bool",
         "Convert the tensor first (of complex numbers, sum view_as_real)");
}

shm::Reduction Call::reduction(const at::Tensor& tensor, const c10d::ReduceOp& op) const {
  shm::Reduction reduction{number(tensor), Combine::kSum};
  for (const auto& each : kOperations) {
    if (each.op != op.op_) continue;
    reduction.combine = each.combine;
    if (!kernels::can_combine(reduction.number, reduction.combine))
      refuse(fmt::format("{} of {}", each.name, c10::toString(tensor.scalar_type())),
             "PREMUL_SUM of floats, BAND, BOR and BXOR of integers or bool, AVG of anything but bool",
             "Convert the tensor or choose another reduction");
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

Call::Region Call::piece(const at::Tensor& tensor) const {
  const bool usable = tensor.defined() && tensor.device().is_cpu() && tensor.layout() == at::kStrided &&
                      tensor.is_contiguous();
  if (!usable)
    refuse(!tensor.defined()           ? "an undefined tensor"
           : !tensor.device().is_cpu() ? "a tensor on " + tensor.device().str()
                                       : "a tensor that is not contiguous",
           "a contiguous tensor on the CPU",
           "Call contiguous() or cpu() first, or give the group a backend of that device");
  return {static_cast<std::byte*>(tensor.data_ptr()), static_cast<std::uint64_t>(tensor.nbytes())};
}

const at::Tensor& Call::only(const Tensors& tensors) const {
  if (tensors.size() == 1) return tensors[0];
  refuse(fmt::format("{} tensors", tensors.size()), "one tensor", "Call it once for each tensor");
}

void Call::as_many(std::size_t outputs, std::size_t inputs) const {
  if (outputs == inputs) return;
  refuse(fmt::format("{} outputs for {} inputs", outputs, inputs), "as many outputs as inputs",
         "Give one output for each input");
}

void Call::same_size(const at::Tensor& whole, const at::Tensor& own) const {
  if (whole.numel() == own.numel()) return;
  refuse(fmt::format("an output of {} elements for this rank's part of {}", whole.numel(), own.numel()),
         "as many elements", "Size the outputs after the ranks' parts");
}

void Call::one_for_each(const Tensors& tensors) const {
  if (tensors.size() == static_cast<std::size_t>(size_)) return;
  refuse(fmt::format("a list of {} tensors", tensors.size()), fmt::format("{}, one for each rank", size_),
         "Give one tensor for each rank");
}

const Tensors& Call::one_list(const std::vector<Tensors>& lists) const {
  if (lists.size() != 1) refuse(fmt::format("{} lists of tensors", lists.size()), "one", "Give one list");
  one_for_each(lists[0]);
  return lists[0];
}

std::vector<Call::Region> Call::list(const Tensors& tensors, const at::Tensor& like,
                                     std::int64_t count) const {
  one_for_each(tensors);
  std::vector<Region> pieces;
  for (const at::Tensor& tensor : tensors) {
    pieces.push_back(piece(tensor));
    same_type(tensor, like);
    if (count >= 0 && tensor.numel() != count)
      refuse("a list with a tensor of " + shape(tensor), fmt::format("{} elements in each", count),
             "Make them alike, or use an operation whose parts may differ");
  }
  return pieces;
}

std::vector<Call::Region> Call::cut(const at::Tensor& whole, const at::Tensor& part) const {
  same_type(whole, part);
  if (whole.numel() != part.numel() * size_)
    refuse(fmt::format("{} in all and {} for each rank", shape(whole), shape(part)),
           fmt::format("{} times as many elements in all", size_),
           "Pad the data to a multiple of the group's size, or use an operation whose parts may differ");
  const Region all = piece(whole);
  std::vector<Region> pieces;
  for (int r = 0; r < size_; ++r)
    pieces.push_back({all.data + static_cast<std::size_t>(r) * part.nbytes(), part.nbytes()});
  return pieces;
}

std::vector<Call::Region> Call::cut_rows(const at::Tensor& whole, const Rows& splits) const {
  const Region all = piece(whole);
  const std::int64_t total = whole.dim() > 0 ? whole.size(0) : 1;
  splits.empty() ? even_rows(total) : rows(splits, total, "splits");
  const std::uint64_t row_bytes = total > 0 ? all.bytes / static_cast<std::uint64_t>(total) : 0;
  std::vector<Region> pieces;
  std::byte* data = all.data;
  for (int r = 0; r < size_; ++r) {
    const std::int64_t part = splits.empty() ? total / size_ : splits[static_cast<std::size_t>(r)];
    pieces.push_back({data, static_cast<std::uint64_t>(part) * row_bytes});
    data += pieces.back().bytes;
  }
  return pieces;
}

void Call::disjoint(const Region& own, const std::vector<Region>& others, bool may_share) const {
  for (std::size_t r = 0; r < others.size(); ++r) {
    const Region& other = others[r];
    const bool overlap = own.bytes > 0 && other.bytes > 0 && own.data < other.data + other.bytes &&
                         other.data < own.data + own.bytes;
    if (!overlap || (may_share && static_cast<int>(r) == rank_ && own.data == other.data)) continue;
    refuse("an input and an output that overlap",
           "separate memory, except for the part that a rank has for itself", "Give it an output of its own");
  }
}

void Call::disjoint(const std::vector<Region>& inputs, const std::vector<Region>& outputs) const {
  for (std::size_t r = 0; r < inputs.size(); ++r) disjoint(inputs[r], outputs, static_cast<int>(r) == rank_);
}

}  // namespace isograd
