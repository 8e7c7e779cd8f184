// Model FLOPs utilisation (MFU): the arithmetic that a step's model needs, over what the devices of all ranks
// could have done in its time.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "isograd/decoder_lm.hpp"
#include "isograd/group.hpp"
#include "train/config.hpp"

namespace isograd {

// FLOPs of forward and backward over `tokens` tokens of which `pairs` (query, key) pairs attend: 6 a token
// and weight of a matrix product, 12 a pair, head and channel. Chowdhery et al., PaLM, 2022, appendix B, but
// for the pairs: a causal mask leaves about half of them, and only those are counted. Norms, biases and what
// is computed again are not.
double decoder_flops(const DecoderConfig& shape, double tokens, double pairs);

struct Peak {
  double flops_per_second = 0;  // of all ranks together; 0: not known
  std::string source{};         // "measured: products of 512 x 512 matrices in float32"
};

// run.peak_tflops times the ranks; where that is 0, what matrix products in `dtype` reach on all ranks at
// once: some tens of milliseconds. Collective.
Peak find_peak(const RunConfig& config, at::ScalarType dtype, at::Device device, Group& group);

}  // namespace isograd
