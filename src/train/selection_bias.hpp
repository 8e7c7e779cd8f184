// Balance without a loss (Wang et al. 2024, arXiv 2408.15664, algorithm 1; DeepSeek-V3): a bias, which only
// the choice of experts sees, follows their loads.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "isograd/data_parallel.hpp"
#include "isograd/model.hpp"

namespace isograd {

class SelectionBias {
 public:
  // Of the biases as they are in the model that `layout` was made of, which outlives this. Collective.
  SelectionBias(DecoderLM& model, DataParallel& layout, double rate);
  // By `rate` up where an expert got less than the mean of its layer, down where more. `choices`: of a step,
  // over all ranks, by layer that has experts and expert. Collective; the same bits on every rank.
  void move(const std::vector<double>& choices);

 private:
  DataParallel& layout_;
  double rate_;
  std::vector<std::pair<std::string, at::Tensor>> biases_{};  // [E] each, whole
};

}  // namespace isograd
