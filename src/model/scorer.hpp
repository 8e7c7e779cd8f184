// Scorer: a multilayer perceptron from features to one score, for ranking rows of a table.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
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

// For tensor parallelism: before a column-parallel layer, and after the row-parallel one that follows it.
struct ScorerHooks {
  std::function<at::Tensor(const at::Tensor&)> copy_to_tp, reduce_from_tp;
};

class Scorer {
 public:
  // Hidden layers with ReLU, then one score; weights by (seed, parameter name): normal, variance 2 / inputs
  // (He et al., ICCV 2015); biases 0.
  Scorer(const ScorerShape& shape, at::ScalarType dtype, std::uint64_t seed);
  // Parameters on the meta device: shapes alone.
  static std::shared_ptr<Scorer> without_values(const ScorerShape& shape, at::ScalarType dtype);

  at::Tensor scores(const at::Tensor& features) const;  // [N, F] -> [N, 1]
  std::vector<std::pair<std::string, at::Tensor>>& named() { return named_; }
  void set_hooks(ScorerHooks hooks) { hooks_ = std::move(hooks); }

 private:
  Scorer(const ScorerShape& shape, const at::TensorOptions& options);  // weights left unset
  std::vector<std::pair<std::string, at::Tensor>> named_;              // weight, bias, weight, bias, ...
  ScorerHooks hooks_{};                                                // none: whole
};

}  // namespace isograd
