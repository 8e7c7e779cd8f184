// What one training step says of itself, whoever made it: the currency of comparison and diagnosis.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace isograd {

// What a step says of itself, beside the gradient.
struct StepFigures {
  double loss = 0;
  std::int64_t targets = 0;
  std::int64_t tokens = 0;
  double norm = 0;  // of the whole gradient, before clipping
  double clip_coefficient = 1;
};

// One optimizer step. A field that its writer did not record is empty, or NaN within the figures; what needs
// it is then not claimed.
struct StepDump {
  // Whole (not sharded), summed over ranks and micro-batches as the optimizer would see them, before
  // clipping.
  std::vector<std::pair<std::string, at::Tensor>> gradients;
  StepFigures figures;
  std::vector<std::int64_t>
      samples;  // ids of the samples seen, sorted; an id once for each time it was counted
  std::vector<std::vector<std::int64_t>> counts;  // [rank][micro-batch] targets that carry loss
  std::vector<std::pair<std::string, int>> axes;  // {"dp_shard", 4}, ..., outermost first
  std::string precision;                          // "fp64", "fp32", "bf16"
};

}  // namespace isograd
