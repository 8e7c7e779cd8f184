// What c10d's arguments mean to the engine; ConfigError for those that it cannot serve.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "comm/shm/operation.hpp"

namespace isograd::shm {

using Tensors = std::vector<at::Tensor>;

// Checks the arguments of one call.
class Arguments {
 public:
  Arguments(const char* operation, const std::string& group, int rank, int size)
      : operation_(operation), group_(group), rank_(rank), size_(size) {}

  // Raw memory: contiguous and on the CPU.
  Region piece(const at::Tensor& tensor) const;
  const at::Tensor& only(const Tensors& tensors) const;
  // One tensor for each rank, of `like`'s type. `count` >= 0: of so many elements each.
  std::vector<Region> list(const std::vector<Tensors>& lists, const at::Tensor& like,
                           std::int64_t count) const;
  std::vector<Region> list(const Tensors& tensors, const at::Tensor& like, std::int64_t count) const;
  // Equal parts of one tensor, `part` being like one of them.
  std::vector<Region> cut(const at::Tensor& whole, const at::Tensor& part) const;
  // Parts of `splits[r]` rows; equal ones if there are no splits.
  std::vector<Region> cut_rows(const at::Tensor& whole, const std::vector<std::int64_t>& splits) const;
  // Peers read `inputs` while this rank writes `outputs`, both by rank. Only what it has for itself is read
  // by nobody else, and may be input and output in one.
  void apart(const std::vector<Region>& inputs, const std::vector<Region>& outputs) const;
  void apart(const Region& own, const std::vector<Region>& others, bool may_share = true) const;
  void same_type(const at::Tensor& a, const at::Tensor& b) const;
  int root(std::int64_t rank) const;
  int peer(int rank) const;
  Reduction reduction(const at::Tensor& tensor, const c10d::ReduceOp& op) const;
  [[noreturn]] void refuse(const std::string& found, const std::string& expected,
                           const std::string& action) const;

 private:
  const char* operation_;
  const std::string& group_;
  int rank_, size_;
};

inline std::int8_t code_of(const at::Tensor& tensor) {
  return static_cast<std::int8_t>(tensor.scalar_type());
}

}  // namespace isograd::shm
