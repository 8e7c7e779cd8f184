// Model FLOPs utilisation (MFU): the arithmetic that a step's model needs, over what the devices of all ranks
// could have done in its time.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "isograd/group.hpp"
#include "isograd/model.hpp"
#include "train/config.hpp"

namespace isograd {

// FLOPs of forward and backward over `tokens` tokens in which `pairs` (query, key) pairs attend: 6 per token
// and matrix weight, 12 per pair, head and channel (Chowdhery et al., PaLM, 2022, appendix B). Unlike there,
// pairs that a causal mask hides are not counted. Norms, biases and recomputation are not counted either.
double decoder_flops(const DecoderConfig& shape, double tokens, double pairs);

struct Peak {
  double flops_per_second = 0;  // of all ranks together; 0: not known, or not steady
  std::string source{};         // "measured: products of 512 x 512 matrices in float32"
};

// The median of all times if the medians of the rounds agree within kSteadyPeak, otherwise nothing.
inline constexpr double kSteadyPeak = 1.5;
std::optional<double> steady_time(const std::vector<std::vector<double>>& rounds);

// run.peak_tflops times the ranks. If it is 0, measures matrix products in `dtype` on all ranks at once, in
// three rounds of some hundred milliseconds altogether. If a rank's rounds differ too much, the peak is 0
// and `source` says so. Collective.
Peak find_peak(const RunConfig& config, at::ScalarType dtype, at::Device device, Group& group);

}  // namespace isograd
