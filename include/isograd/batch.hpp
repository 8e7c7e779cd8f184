// Batch: the tokens of one micro-batch on one rank, several fragments one after another, without padding.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace isograd {

inline constexpr std::int64_t kIgnoreIndex = -100;  // a target that carries no loss

// Fragment f occupies positions cu_seqlens[f] .. cu_seqlens[f+1] - 1. Attention and positions never cross a
// fragment. Several packs are laid one after another. A batch may be empty (T_local = 0, F = 0).
struct Batch {
  at::Tensor tokens;                         // [T_local] int64
  at::Tensor targets;                        // [T_local] int64, the next token of the sample, or kIgnoreIndex
  at::Tensor positions;                      // [T_local] int64, from 0 in each fragment
  std::vector<std::int64_t> cu_seqlens{0};   // [F + 1], first 0, last T_local
  std::vector<std::int64_t> sample_ids;      // [F]; fragments of one sample share its id
  std::vector<std::int64_t> sample_targets;  // [F], valid targets of that sample in the whole step, all ranks
  // [T_local] floating or bool, finite, >= 0; undefined: all 1. What each token's loss is multiplied by in a
  // sum. Normalizer::prepare() replaces it where the mean needs that (w_i / T_b under the sample mean).
  at::Tensor weights;
  // Set by Normalizer::prepare(), for further terms of the same forward: the weights as the caller gave them,
  // and w_i / T_b where samples are counted.
  at::Tensor given_weights, sample_weights;

  std::int64_t num_tokens() const { return cu_seqlens.back(); }
  std::int64_t num_fragments() const { return static_cast<std::int64_t>(sample_ids.size()); }
  // Targets that carry loss, counted exactly.
  std::int64_t num_targets() const;
};

Batch empty_batch();  // no token, with tensors of the right types

using MicroBatches = std::vector<Batch>;  // this rank's part of one step, in order

}  // namespace isograd
