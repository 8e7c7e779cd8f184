// Translates c10d's arguments for the engine. ConfigError for those that it does not support.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "comm/shm/operation.hpp"

namespace isograd::shm {

using Tensors = std::vector<at::Tensor>;

// Checks the arguments of one call of a backend.
class Arguments {
 public:
  Arguments(std::string_view operation, const std::string& group, int rank, int size,
            const char* backend = "shm")
      : operation_(operation), group_(group), backend_(backend), rank_(rank), size_(size) {}

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
  std::vector<Region> cut_rows(const at::Tensor& whole, const std::vector<std::int64_t>& splits) const;
  // Refuses overlaps, because peers read `inputs` while this rank writes `outputs` (both by rank). This
  // rank's part for itself may be both, because no other rank reads it.
  void check_disjoint(const std::vector<Region>& inputs, const std::vector<Region>& outputs) const;
  void check_disjoint(const Region& own, const std::vector<Region>& others, bool may_share = true) const;
  void same_type(const at::Tensor& a, const at::Tensor& b) const;
  int root(std::int64_t rank) const;
  int peer(int rank) const;
  Reduction reduction(const at::Tensor& tensor, const c10d::ReduceOp& op) const;
  [[noreturn]] void refuse(const std::string& found, const std::string& expected,
                           const std::string& action) const;

 private:
  std::string_view operation_;
  const std::string& group_;
  const char* backend_;
  int rank_, size_;
};

inline std::int8_t code_of(const at::Tensor& tensor) {
  return static_cast<std::int8_t>(tensor.scalar_type());
}

}  // namespace isograd::shm
