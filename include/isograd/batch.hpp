// Batch: the tokens of one micro-batch on one rank, several fragments one after another, without padding.
#pragma once

#include "isograd/error.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace isograd {

inline constexpr std::int64_t kIgnoreIndex = -100;  // a target that carries no loss

inline constexpr std::int64_t kPaddingSample = -1;  // the sample id of tokens that fill up a rank's part

// Consecutive tokens of one document of a batch that is cut over context ranks.
struct Piece {
  std::int64_t document = 0;  // fragment of the uncut batch; F + r: what fills up rank r's part
  std::int64_t begin = 0;     // within the document
  std::int64_t length = 0;    // may be 0
};

// Where the tokens of a batch lie that is cut over context ranks (include/isograd/context_parallel.hpp). The
// same on all of them but for `rank`. Plain data.
struct ContextCut {
  std::vector<std::int64_t> cu_seqlens{0};  // [F + 1] of the uncut batch
  std::vector<std::vector<Piece>> pieces;   // by rank; the fragments of that rank's batch, in order
  int rank = 0;

  const std::vector<Piece>& own() const { return pieces[static_cast<std::size_t>(rank)]; }
  std::int64_t document_length(std::int64_t document) const;  // of padding: the padding's own
  std::int64_t tokens_of(int of_rank) const;
};

// Fragment f occupies positions cu_seqlens[f] .. cu_seqlens[f+1] - 1. Attention and positions never cross a
// fragment. Several packs are laid one after another. A batch may be empty (T_local = 0, F = 0).
struct Batch {
  at::Tensor tokens;                         // [T_local] int64
  at::Tensor targets;                        // [T_local] int64, the next token of the sample, or kIgnoreIndex
  at::Tensor positions;                      // [T_local] int64, from 0 in each fragment
  std::vector<std::int64_t> cu_seqlens{0};   // [F + 1], first 0, last T_local
  std::vector<std::int64_t> sample_ids;      // [F]; fragments of one sample share its id
  std::vector<std::int64_t> sample_targets;  // [F], valid targets of that sample in the whole step, all ranks
  std::int64_t draw = 0;  // the step: keys the randomness of the forward, with seed, sample and position
  // [T_local] floating or bool, finite, >= 0; undefined: all 1. What each token's loss is multiplied by in a
  // sum. Normalizer::prepare() replaces it where the mean needs that (w_i / T_b under the sample mean).
  at::Tensor weights;
  // What the forward reads of samples that are no sequences of tokens: images, rows of a table, masks, of any
  // types (docs/own_data.md). Each is [F, ...], row f belonging to fragment f. A batch that only fills up a
  // round (empty_batch()) has none.
  std::vector<at::Tensor> inputs;
  // Not null: this is a context rank's part. Fragment f is then piece f of cut->own(), positions go on where
  // the piece begins, and attention reaches the rest of the document on other ranks.
  std::shared_ptr<const ContextCut> cut;
  // Set by Normalizer::prepare(), for further terms of the same forward: the weights as the caller gave them,
  // and w_i / T_b where samples are counted.
  at::Tensor given_weights, sample_weights;
  // Set by to_device(), so that a forward need not wait for the device to ask it: cu_seqlens there, [F + 1]
  // int32, and the largest of the positions (-1: not known).
  at::Tensor cu_seqlens_on_device;
  std::int64_t largest_position = -1;
  // A batch of a recorded step: cu_seqlens has one fragment of all tokens and empty ones, which bound the
  // true ones on the device.
  bool bounds_only = false;

  std::int64_t num_tokens() const { return cu_seqlens.back(); }
  std::int64_t num_fragments() const { return static_cast<std::int64_t>(sample_ids.size()); }
  // Targets that carry loss, counted exactly.
  std::int64_t num_targets() const;
};

// The batch with its tokens, targets, positions, weights and inputs on `device`; on a GPU by way of pinned
// memory, so that the copy runs beside what the device computes. Counting wants them on the CPU: move what
// Normalizer::prepare() gave.
Batch to_device(const Batch& batch, at::Device device);

Batch empty_batch();  // no token, with tensors of the right types

// A micro-batch of F samples that are no sequences of tokens. inputs: for the forward, [F, ...] each. targets
// [F] or [F, ...] int64: what each sample is trained for, one number or several (the classes of an image's
// pixels), kIgnoreIndex where there is no loss. A loss that reads what it is trained for from `inputs` passes
// zeros: they say how many losses a sample has. sample_ids [F]: which samples of the data set these are. The
// batch then counts like one of tokens: T_local is the number of targets, a sample's follow one another in
// Batch::targets, and sample_targets are taken from them, so that samples must be whole. ConfigError: sizes
// or types that do not fit.
Batch batch_of_samples(std::vector<at::Tensor> inputs, const at::Tensor& targets,
                       std::vector<std::int64_t> sample_ids);

using MicroBatches = std::vector<Batch>;  // this rank's part of one step, in order

}  // namespace isograd
