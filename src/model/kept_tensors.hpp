// The tensors that a decoder's forward keeps for its backward, by name and bytes: what the autograd functions
// of fused.cpp, attention/, experts.cpp and the loss save, each storage once. Numbers only.
#pragma once

#include <cstdint>
#include <vector>

#include "isograd/model.hpp"

namespace isograd {

// How a rank computes a block.
struct KeptShape {
  std::int64_t tokens = 0;   // of a micro-batch on this rank, after cp
  std::int64_t element = 4;  // bytes: bfloat16 2, float32 4, float64 8
  std::int64_t tp = 1, cp_ulysses = 1, ep = 1;
  bool sequence_parallel = true, context_parallel = false, checkpoint = false;
  bool on_gpu = false;  // attention by cuDNN or the fragments' kernel, not by tiles
  // Gradients of weights: written where they are kept, where that can be had (weight_gradient() of
  // fused.hpp); not so, under zero2, whose buffers take turns; or together until a unit's backward ends,
  // under zero3.
  enum class Gradients : std::uint8_t { kInPlace, kPassing, kOfUnits } gradients = Gradients::kInPlace;
  // Which backward passes: a whole one, or a half (parallel/pipeline/split_backward.hpp). The first half
  // leaves what kept_between_halves() lists, the second makes the gradients of weights.
  enum class Half : std::uint8_t { kWhole, kInputs, kWeights } half = Half::kWhole;
};

struct KeptTensor {
  const char* name;        // "attention: queries"
  std::int64_t bytes = 0;  // of the fullest rank
};

// Tensors of one block, with its input; of what all blocks of a forward share; of the last norm, the logits
// and the loss, where the first whose name begins with "loss: logits" are the logits. With `checkpoint` a
// block keeps its input alone. Each rank is assumed to get as many copies of tokens for its experts as it
// sends.
std::vector<KeptTensor> kept_by_block(const DecoderConfig& config, std::int64_t layer,
                                      const KeptShape& shape);
std::vector<KeptTensor> kept_by_pass(const DecoderConfig& config, const KeptShape& shape);
std::vector<KeptTensor> kept_by_output(const DecoderConfig& config, const KeptShape& shape, bool fused_loss);
// Between the halves of a backward (parallel/pipeline/split_backward.hpp): inputs of products, and the
// gradients of what they gave. The output keeps its normed input and the logits' gradient; of a fused loss
// both gradients that its forward made.
std::int64_t kept_between_halves(const DecoderConfig& config, std::int64_t layer, const KeptShape& shape);
std::int64_t kept_between_halves_by_output(const DecoderConfig& config, const KeptShape& shape,
                                           bool fused_loss);
std::int64_t total(const std::vector<KeptTensor>& tensors);

// The most that the backward of a block, or of the output, holds beyond all that was kept: gradients on their
// way, less what it has let go by then. With `checkpoint` the block's other tensors are in it.
std::int64_t in_passing(const DecoderConfig& config, std::int64_t layer, const KeptShape& shape);
std::int64_t in_passing_of_output(const DecoderConfig& config, const KeptShape& shape, bool fused_loss);

// Heads of keys and values on the fullest rank along tp: those whose weights it has, and those that its
// attention reads (parallel/tensor/cut.cpp): cut where tp divides them, one with copies where they divide tp,
// else all are kept and one is read for each query head.
struct KeyHeads {
  std::int64_t kept = 0, normed = 0, read = 0;
  bool by_index = false;  // read through a list of heads
};
KeyHeads key_heads_of(const DecoderConfig& config, std::int64_t tp);

}  // namespace isograd
