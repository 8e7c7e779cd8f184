// The tensors that a decoder's forward keeps for its backward, by name and bytes: what the autograd functions
// of fused.cpp, attention/ and experts.cpp save, each storage once. Numbers only.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "isograd/model.hpp"

namespace isograd {

// How a rank computes a block.
struct KeptShape {
  std::int64_t tokens = 0;   // of a micro-batch on this rank, after cp
  std::int64_t element = 4;  // bytes: bfloat16 2, float32 4, float64 8
  std::int64_t tp = 1, cp_ulysses = 1, ep = 1;
  bool sequence_parallel = true, context_parallel = false, checkpoint = false;
  bool on_gpu = false;         // attention by cuDNN or the fragments' kernel, not by tiles
  std::int64_t fragments = 1;  // documents in the micro-batch
};

struct KeptTensor {
  const char* name;        // "attention: queries"
  std::int64_t bytes = 0;  // of the fullest rank
};

// Tensors of one block; of the last norm, the logits and the loss; and the largest sum of tensors that a
// block's backward holds in addition. With `checkpoint` a block keeps its input alone, and in_passing()
// counts the rest.
std::vector<KeptTensor> kept_by_block(const DecoderConfig& config, std::int64_t layer,
                                      const KeptShape& shape);
std::vector<KeptTensor> kept_by_output(const DecoderConfig& config, const KeptShape& shape, bool fused_loss);
std::int64_t in_passing(const DecoderConfig& config, std::int64_t layer, const KeptShape& shape);
std::int64_t total(const std::vector<KeptTensor>& tensors);

}  // namespace isograd
