// Group's errors: arguments that do not fit and backends that fail.
#include <ATen/MemoryOverlap.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstring>

#include "base/refuse.hpp"
#include "comm/group_impl.hpp"

namespace isograd {
namespace {

bool can_be_combined(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
    case at::kFloat:
    case at::kBFloat16:
    case at::kHalf:
    case at::kLong:
    case at::kInt:
    case at::kShort:
    case at::kChar:
    case at::kByte:
    case at::kBool:
      return true;
    default:
      return false;
  }
}

std::string describe(at::IntArrayRef sizes, at::ScalarType type) {
  return fmt::format("[{}] of {}", fmt::join(sizes, ", "), c10::toString(type));
}

std::string describe(const at::Tensor& tensor) {
  return describe(tensor.sizes(), tensor.scalar_type());
}

}  // namespace

std::string Group::Impl::where(const Call& call) const {
  const char* file = call.site.file_name();
  const char* slash = std::strrchr(file, '/');
  return fmt::format("{} of group '{}' on rank {} of {} at {}:{}", call.operation, name, rank, size,
                     slash ? slash + 1 : file, call.site.line());
}

void Group::Impl::refuse(const Call& call, std::string found, std::string expected,
                         std::string action) const {
  isograd::refuse(where(call), std::move(found), std::move(expected), std::move(action));
}

// A backend that lacks an operation reports it in c10d's words, on every rank and before anything is sent.
void Group::Impl::lost(const Call& call, const char* what) const {
  if (std::strstr(what, "does not support") || std::strstr(what, "does not implement")) {
    throw MissingOperation({.where = where(call),
                            .found = what,
                            .expected = "a backend that has this operation",
                            .action = "Use another backend"});
  }
  throw PeerError({.where = where(call),
                   .found = what,
                   .expected = "a completed operation",
                   .action = "See what the backend reports, then recreate the group"});
}

void Group::Impl::aborted(const Call& call) const {
  throw PeerError({.where = where(call),
                   .found = "the backend aborted the operation",
                   .expected = "a completed operation",
                   .action = "Recreate the group"});
}

void Group::Impl::check(const Call& call, const at::Tensor& tensor, const char* which) const {
  if (tensor.defined() && tensor.layout() == at::kStrided) return;
  refuse(call, fmt::format("{} {}", tensor.defined() ? "a sparse" : "an undefined", which),
         "a dense tensor on the backend's device", "Give one");
}

void Group::Impl::check_reduction(const Call& call, const at::Tensor& tensor, ReduceOp op) const {
  if (op == ReduceOp::kAverage) {
    refuse(call, "ReduceOp::kAverage",
           "a sum: gradients are summed and one place divides; a mean of per-rank means is another loss",
           "Use kSum and let the loss's normaliser divide, once, by what all ranks counted");
  }
  if (op != ReduceOp::kSum && op != ReduceOp::kMax && op != ReduceOp::kMin && op != ReduceOp::kProduct) {
    refuse(call, fmt::format("reduction number {}", static_cast<int>(op)), "kSum, kMax, kMin or kProduct",
           "Use one of these");
  }
  if (!can_be_combined(tensor.scalar_type())) {
    refuse(call, fmt::format("a tensor of {}", c10::toString(tensor.scalar_type())),
           "float64, float32, bfloat16, float16, int64, int32, int16, int8, uint8 or bool",
           "Convert the tensor first (of complex numbers, sum view_as_real)");
  }
}

void Group::Impl::check_root(const Call& call, int root) const {
  if (root >= 0 && root < size) return;
  refuse(call, fmt::format("root {}", root), fmt::format("0 to {}", size - 1), "Name a rank of the group");
}

void Group::Impl::check_peer(const Call& call, int peer, int tag) const {
  if (peer < 0 || peer >= size || peer == rank) {
    refuse(call, fmt::format("rank {} as the other end", peer),
           fmt::format("a rank from 0 to {} that is not this one", size - 1),
           "Name another rank of the group");
  }
  if (tag < 0) refuse(call, fmt::format("tag {}", tag), "0 or more", "Choose another tag");
}

void Group::Impl::check_stack(const Call& call, const at::Tensor& whole, const char* which,
                              std::int64_t first, const at::Tensor& part, std::int64_t skip) const {
  const auto rest = part.sizes().slice(static_cast<std::size_t>(skip));
  if (whole.dim() == static_cast<std::int64_t>(rest.size()) + 1 && whole.size(0) == first &&
      whole.sizes().slice(1) == rest && whole.scalar_type() == part.scalar_type()) {
    return;
  }
  std::vector<std::int64_t> sizes{first};
  sizes.insert(sizes.end(), rest.begin(), rest.end());
  refuse(call, fmt::format("an {} {}", which, describe(whole)), describe(sizes, part.scalar_type()),
         fmt::format("Make the {} of these sizes, or view it so", which));
}

void Group::Impl::check_has_rows(const Call& call, const at::Tensor& tensor, const char* which) const {
  if (tensor.dim() > 0) return;
  refuse(call, fmt::format("an {} without dimensions", which), "one with rows (dim 0)",
         "Call unsqueeze(0) first");
}

void Group::Impl::check_rows(const Call& call, const Rows& rows, std::int64_t total,
                             const char* which) const {
  std::int64_t sum = 0;
  bool sound = rows.size() == static_cast<std::size_t>(size);
  for (std::int64_t part : rows) {
    sound = sound && part >= 0 && part <= total - sum;
    sum += part;
  }
  if (sound && sum == total) return;
  refuse(call, fmt::format("{} [{}] for {} rows", which, fmt::join(rows, ", "), total),
         fmt::format("a number for each of {} ranks, {} together", size, total),
         "Count the rows of each rank (split_rows gives the most even numbers)");
}

at::Tensor Group::Impl::plain_empty(const at::Tensor& like) const {
  return at::empty(like.sizes(), like.options().device(device).memory_format(at::MemoryFormat::Contiguous));
}

at::Tensor Group::Impl::plain_copy(const at::Tensor& tensor) const {
  const at::NoGradGuard no_graph;
  return plain_empty(tensor).copy_(tensor);
}

at::Tensor Group::Impl::plain_twin(const Call& call, const at::Tensor& tensor, bool read,
                                   Started& started) const {
  if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    refuse(call, "a tensor to write to whose elements share memory (expanded?)", "a place for each element",
           "Call clone() first");
  }
  const at::NoGradGuard no_graph;
  at::Tensor twin = read ? plain_copy(tensor) : plain_empty(tensor);
  started.copies.push_back({tensor, twin});
  return twin;
}

void Group::Impl::copy_results(Started& started) {
  const at::NoGradGuard no_graph;
  for (Started::Copy& copy : started.copies) copy.to.copy_(copy.from);
  started.copies.clear();
}

}  // namespace isograd
