// One call of an operation: its place in errors, and the checks of its arguments. Group makes one for its
// caller, and each backend makes one, because PyTorch calls backends directly.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "comm/shm/operation.hpp"

namespace isograd {

using Tensors = std::vector<at::Tensor>;

class Call {
 public:
  using Region = shm::Region;
  using Rows = std::vector<std::int64_t>;

  Call(std::string_view operation, const std::string& group, int rank, int size, const char* backend = "",
       CallSite site = current_call_site())
      : operation_(operation), group_(group), backend_(backend), rank_(rank), size_(size), site_(site) {}

  // "all_reduce of group 'world' (shm) on rank 1 of 4 at trainer.cpp:7"
  std::string where() const;
  std::string_view operation() const { return operation_; }
  const CallSite& site() const { return site_; }
  [[noreturn]] void refuse(const std::string& found, const std::string& expected,
                           const std::string& action) const;

  // Each check throws a ConfigError.
  void dense(const at::Tensor& tensor, const char* which = "tensor") const;
  void has_rows(const at::Tensor& tensor, const char* which) const;
  // `rows` has one number for each rank, with the sum `total`.
  void rows(const Rows& rows, std::int64_t total, const char* which) const;
  void even_rows(std::int64_t total) const;
  // `whole` is [first, ...rest of part's sizes], of its type. The first `skip` sizes of part are not in the
  // rest.
  void stack(const at::Tensor& whole, const char* which, std::int64_t first, const at::Tensor& part,
             std::size_t skip) const;
  void same_type(const at::Tensor& a, const at::Tensor& b) const;
  int root(std::int64_t rank) const;
  int peer(int rank) const;
  void message(int other, int tag) const;
  kernels::Number number(const at::Tensor& tensor) const;  // that can be combined
  shm::Reduction reduction(const at::Tensor& tensor, const c10d::ReduceOp& op) const;

  // ---- for backends ----
  // Raw memory. The tensor must be contiguous and on the CPU.
  Region piece(const at::Tensor& tensor) const;
  const at::Tensor& only(const Tensors& tensors) const;
  void as_many(std::size_t outputs, std::size_t inputs) const;
  void same_size(const at::Tensor& whole, const at::Tensor& own) const;  // of this rank's part
  void one_for_each(const Tensors& tensors) const;                       // a list of one tensor for each rank
  const Tensors& one_list(const std::vector<Tensors>& lists) const;      // the only list, one_for_each
  // The memory of such a list, with `like`'s type. `count` >= 0: each must have this number of elements.
  std::vector<Region> list(const Tensors& tensors, const at::Tensor& like, std::int64_t count = -1) const;
  // Equal parts of one tensor; `part` has the size of one.
  std::vector<Region> cut(const at::Tensor& whole, const at::Tensor& part) const;
  // Parts of `splits[r]` rows; equal parts without splits.
  std::vector<Region> cut_rows(const at::Tensor& whole, const Rows& splits) const;
  // Refuses overlaps, because peers read `inputs` while this rank writes `outputs` (both by rank). This
  // rank's part for itself may be both, because no other rank reads it.
  void disjoint(const std::vector<Region>& inputs, const std::vector<Region>& outputs) const;
  void disjoint(const Region& own, const std::vector<Region>& others, bool may_share = true) const;

 private:
  std::string_view operation_;
  const std::string& group_;
  const char* backend_;  // empty: Group's own check
  int rank_, size_;
  CallSite site_;
};

}  // namespace isograd
