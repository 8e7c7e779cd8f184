// Scorer: a multilayer perceptron from features to one score, for ranking rows of a table. No parallel code.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace isograd {

struct ScorerShape {
  std::int64_t features = 1;
  std::int64_t hidden = 64, layers = 1;  // units of each hidden layer, hidden layers
  // Off for losses that see differences of scores alone: its gradient would be zero, and in practice
  // rounding.
  bool output_bias = true;
};

class Scorer {
 public:
  // Hidden layers with ReLU, then one score; weights by (seed, parameter name): normal, variance 2 / inputs
  // (He et al., ICCV 2015); biases 0.
  Scorer(const ScorerShape& shape, at::ScalarType dtype, std::uint64_t seed);

  at::Tensor scores(const at::Tensor& features) const;  // [N, F] -> [N, 1]
  std::vector<std::pair<std::string, at::Tensor>>& named() { return named_; }

 private:
  std::vector<std::pair<std::string, at::Tensor>> named_;  // weight, bias, weight, bias, ...
};

}  // namespace isograd
