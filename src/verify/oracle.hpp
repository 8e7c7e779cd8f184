// The outside oracle: one process, the whole batch, plain LibTorch.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "isograd/verify.hpp"

namespace isograd {

struct OracleStep {
  StepFigures figures;
  std::vector<std::string> names;     // trainable parameters, in the model's order
  std::vector<at::Tensor> gradients;  // fp64 for fp64 parameters, otherwise fp32
};

// The token-mean step of `model` on `whole`: it counts, sums, takes the norm and clips by itself, and shares
// with the product only the model's forward. `after_micro_batch` is called after each micro-batch.
OracleStep oracle_step(const VerifyModel& model, const MicroBatches& whole, double max_norm,
                       const std::function<void()>& after_micro_batch);

}  // namespace isograd
