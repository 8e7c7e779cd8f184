// Cosines and sines of the rotary embedding, for every kind of scaling.
#pragma once

#include <ATen/core/Tensor.h>

#include <mutex>
#include <utility>
#include <vector>

#include "isograd/model.hpp"

namespace isograd {

// Frequencies [head_dim/2] of a sequence of `length` positions, and the factor on cosines and sines, by the
// formulas of Hugging Face's modeling_rope_utils in the given type. Only `dynamic` depends on the length, and
// only beyond max_positions.
std::pair<at::Tensor, double> rotary_frequencies(const DecoderConfig& config, std::int64_t length,
                                                 at::ScalarType type);

// Keeps the table of positions seen so far; may be used by several threads.
class RotaryTable {
 public:
  RotaryTable(const DecoderConfig& config, at::ScalarType type) : config_(config), type_(type) {}

  // Do positions of a sequence of that length turn by angles of their own?
  bool depends_on_length(std::int64_t length) const;

  // cos and sin [T, head_dim/2] at `positions` [T]. Where the length matters, that of a fragment's document
  // decides (`lengths` [F]; not given: what its positions reach), so that no document depends on another.
  // `largest_position`: of `positions` where the caller knows it, which saves waiting for a GPU; -1: looked
  // up.
  std::pair<at::Tensor, at::Tensor> at(const at::Tensor& positions,
                                       const std::vector<std::int64_t>& cu_seqlens,
                                       const std::vector<std::int64_t>& lengths = {},
                                       std::int64_t largest_position = -1);

 private:
  std::pair<at::Tensor, at::Tensor> compute(const at::Tensor& positions, std::int64_t length) const;

  const DecoderConfig config_;
  const at::ScalarType type_;
  std::mutex mutex_;
  std::vector<at::Tensor> earlier_;  // shorter ones, which recorded kernels may still read
  at::Tensor cos_, sin_;             // [positions so far, head_dim/2], of lengths up to max_positions
};

}  // namespace isograd
