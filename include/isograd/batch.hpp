// Batch: the tokens of one micro-batch on one rank, several fragments one after another, without padding.
#pragma once

#include "isograd/error.hpp"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace isograd {

inline constexpr std::int64_t kIgnoreIndex = -100;  // a target that carries no loss

inline constexpr std::int64_t kPaddingSample = -1;  // sample id of tokens that pad a rank's part

// Consecutive tokens of one document, held by one context rank.
struct Piece {
  std::int64_t document = 0;  // fragment of the whole batch; F + r: the padding of rank r
  std::int64_t begin = 0;     // within the document
  std::int64_t length = 0;    // may be 0
};

// How a batch is split over context ranks (context_parallel.hpp). Equal on all of them, except `rank`.
struct ContextCut {
  std::vector<std::int64_t> cu_seqlens{0};  // [F + 1] of the whole batch
  std::vector<std::vector<Piece>> pieces;   // by rank: the fragments of that rank's batch, in order
  int rank = 0;

  const std::vector<Piece>& own() const { return pieces[static_cast<std::size_t>(rank)]; }
  std::int64_t document_length(std::int64_t document) const;  // for padding: the padding's length
  std::int64_t tokens_of(int of_rank) const;
};

// The tensors of samples. inputs[i] that is not there is a ConfigError: a padding batch has none.
class BatchInputs : public std::vector<at::Tensor> {
 public:
  using std::vector<at::Tensor>::vector;
  BatchInputs() = default;
  BatchInputs(std::vector<at::Tensor> tensors)  // NOLINT: the same thing
      : std::vector<at::Tensor>(std::move(tensors)) {}

  at::Tensor& operator[](std::size_t i) { return data()[present(i)]; }
  const at::Tensor& operator[](std::size_t i) const { return data()[present(i)]; }

 private:
  std::size_t present(std::size_t i) const;
};

// Fragment f is positions cu_seqlens[f] .. cu_seqlens[f+1] - 1; attention never crosses it. F may be 0.
struct Batch {
  at::Tensor tokens;                         // [T_local] int64
  at::Tensor targets;                        // [T_local] int64, the next token of the sample, or kIgnoreIndex
  at::Tensor positions;                      // [T_local] int64, from 0 in each fragment
  std::vector<std::int64_t> cu_seqlens{0};   // [F + 1], first 0, last T_local
  std::vector<std::int64_t> sample_ids;      // [F]; fragments of one sample share its id
  std::vector<std::int64_t> sample_targets;  // [F], valid targets of that sample in the whole step, all ranks
  std::int64_t draw = 0;  // the step: a key of the forward's randomness, with seed, sample and position
  // [T_local] floating or bool, finite, >= 0 (NormalizerOptions::signed_weights: any sign); undefined: all 1.
  // Normalizer::prepare() replaces them for some means.
  at::Tensor weights;
  // Samples that are no token sequences (docs/own_data.md): each [F, ...]. None in a padding batch.
  BatchInputs inputs;
  // Not null: one context rank's part. Fragment f is piece f of cut->own(); its positions start where that
  // begins.
  std::shared_ptr<const ContextCut> cut;
  // Set by Normalizer::prepare() for further terms: the caller's weights, and w_i / T_b for sample means.
  at::Tensor given_weights, sample_weights;
  // Set by to_device(): cu_seqlens there, [F + 1] int32, and the largest position (-1: not known).
  at::Tensor cu_seqlens_on_device;
  std::int64_t largest_position = -1;
  // A batch of a recorded step: one fragment with all tokens, and empty ones; true bounds are on the device.
  bool bounds_only = false;

  std::int64_t num_tokens() const { return cu_seqlens.back(); }
  std::int64_t num_fragments() const { return static_cast<std::int64_t>(sample_ids.size()); }
  // Number of targets that carry loss.
  std::int64_t num_targets() const;
};

// Copies to `device`, for a GPU by pinned memory. Counting needs the CPU: move what prepare() returned.
Batch to_device(const Batch& batch, at::Device device);

Batch empty_batch();  // no tokens; tensors of the right types

// A micro-batch of F whole samples that are no token sequences: inputs each [F, ...]; targets [F] or [F, ...]
// int64 (kIgnoreIndex: no loss; zeros where the loss reads its targets from `inputs`), one for each loss;
// sample_ids [F]. ConfigError: sizes or types.
Batch batch_of_samples(std::vector<at::Tensor> inputs, const at::Tensor& targets,
                       std::vector<std::int64_t> sample_ids);

using MicroBatches = std::vector<Batch>;  // this rank's part of one step, in order

}  // namespace isograd
