// Model FLOPs utilisation (MFU): what a step's model needs over what all devices could have done in its time.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "isograd/group.hpp"
#include "isograd/model.hpp"
#include "train/config.hpp"

namespace isograd {

// FLOPs of forward and backward of `tokens` tokens with `pairs` attending (query, key) pairs: 6 per token and
// matrix weight, 12 per pair, head and channel (PaLM, 2022, appendix B). Masked pairs, norms, biases and
// recomputation are not counted.
double decoder_flops(const DecoderConfig& shape, double tokens, double pairs);

struct Peak {
  double flops_per_second = 0;  // of all ranks together; 0: not known, or not steady
  std::string source{};         // "measured: products of 512 x 512 matrices in float32"
};

// The median of all times if the medians of the rounds agree within kSteadyPeak, otherwise nothing.
inline constexpr double kSteadyPeak = 1.5;
std::optional<double> steady_time(const std::vector<std::vector<double>>& rounds);

// run.peak_tflops times the ranks; if that is 0, matrix products on all ranks at once, in three rounds of
// some 100 ms. The peak is 0, and `source` says so, if a rank's rounds differ too much. Collective.
Peak find_peak(const RunConfig& config, at::ScalarType dtype, at::Device device, Group& group);

}  // namespace isograd
